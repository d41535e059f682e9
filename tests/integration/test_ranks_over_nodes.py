"""A target whose ranks are on several machines: the tokens of one process, and what is lost ends the whole group."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from specdec.client import Client, Completion
from specdec.commands.up.cluster import free_port
from specdec.engine.native.variants import ISA_VARIABLE
from specdec.v1 import coordinator_pb2 as api
from tests.support.engine.tiny_models import save_tiny_model
from tests.support.scripted.model import make_tokenizer
from tests.support.servers.certificates import Authority, SecretVolume
from tests.support.services.faults import CREDIT_WINDOW, Reading, eventually, held_back, sampled_request
from tests.support.services.namespaces import Machine, can_make_machines, machines

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_machines(), reason="network namespaces need root, iproute2 and /dev/net/tun"),
]

PORT = 50052
NUM_TOKENS = 24
NODE_TIMEOUT_S = 5
PATIENCE_S = 240.0
PLAIN = ("--allow-unauthenticated",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be split four ways."""
    folder = save_tiny_model("llama_wide_heads", tmp_path_factory.mktemp("model"))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> SecretVolume:
    """The secret of all nodes."""
    authority = Authority("the authority")
    certificate = authority.issue("target", dns_names=["target.specdec"])
    return SecretVolume(tmp_path_factory.mktemp("tls") / "secret", certificate, authority.certificate)


def requests() -> list[api.GenerateRequest]:
    """A greedy request and sampled ones."""
    made = [sampled_request(seed, [5 + (seed * 7 + i * 3) % 100 for i in range(20)], NUM_TOKENS) for seed in range(3)]
    made[0].sampling.temperature = 0.0
    return made


@dataclass(frozen=True)
class Network:
    """How packets travel between machines, in each direction."""

    delay_s: float
    jitter_s: float = 0.0
    loss: float = 0.0


@dataclass
class Target:
    """A target over machines, or one on this machine."""

    model: Path
    folder: Path
    flags: tuple[str, ...]
    machines: list[Machine] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    num_starts: int = 0
    port: int = PORT

    @property
    def address(self) -> str:
        return f"{self.machines[0].address if self.machines else '127.0.0.1'}:{self.port}"

    def command(self, *more: str) -> list[str]:
        base = ("--model", str(self.model), "--device", "cpu", "--num-blocks", "64", "--metrics-port", "0")
        base += ("--collective-timeout-s", "30", "--node-timeout-s", str(NODE_TIMEOUT_S), "--no-adaptive-speculation")
        return [sys.executable, "-m", "specdec.target_service", *base, "--port", str(self.port), *self.flags, *more]

    def start(
        self, node_flags: Mapping[int, tuple[str, ...]] = {}, variables: Mapping[int, tuple[str, ...]] = {}
    ) -> None:
        """Start all nodes, as LeaderWorkerSet does; logs are new."""
        self.num_starts += 1
        self.processes = []
        for rank, machine in enumerate(self.machines):
            nodes = ("--nnodes", str(len(self.machines)), "--node-rank", str(rank))
            nodes += ("--master-addr", self.machines[0].address)
            command = ["env", *variables.get(rank, ()), *self.command(*nodes, *node_flags.get(rank, ()))]
            self.processes.append(machine.start(command, self.log_path(rank)))

    def log_path(self, rank: int) -> Path:
        return self.folder / f"node-{rank}-{self.num_starts}.log"

    def log(self, rank: int) -> str:
        return self.log_path(rank).read_text() if self.log_path(rank).exists() else ""

    def is_up(self, rank: int) -> bool:
        """Whether a node's service is ready; engines log the same event."""
        return any(
            '"event": "ready"' in line and "specdec.service.server" in line for line in self.log(rank).splitlines()
        )

    async def is_logged(self, rank: int, text: str) -> None:
        async def is_so() -> bool:
            return text in self.log(rank)

        await self._wait(is_so, rank, text)

    async def is_ready(self) -> None:
        for rank in range(len(self.machines)):

            async def is_so(rank: int = rank) -> bool:
                return self.is_up(rank)

            await self._wait(is_so, rank, "readiness")

    async def _wait(self, condition: Callable[[], Awaitable[bool]], rank: int, what: str) -> None:
        try:
            await eventually(condition, f"{what} of node {rank}", PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log(rank)[-3000:]}") from error

    async def exit_codes(self) -> list[int]:
        """Wait until all nodes have ended."""
        return list(await asyncio.gather(*(asyncio.to_thread(one.wait, PATIENCE_S) for one in self.processes)))


def started_here(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process on this machine."""
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


@asynccontextmanager
async def coordinator(targets: list[str], folder: Path, secret: SecretVolume | None = None) -> AsyncIterator[str]:
    """A coordinator without drafts; yields its address."""
    port = free_port()
    flags = ["--targets", ",".join(targets), "--host", "127.0.0.1", "--port", str(port), "--metrics-port", "0"]
    flags += ["--target-timeout-s", "600", "--credit-window-tokens", str(CREDIT_WINDOW)]
    if secret is not None:
        flags += ["--replica-tls-dir", str(secret.folder), "--replica-tls-server-name", "target.specdec"]
    log = folder / f"coordinator-{port}.log"
    process = started_here([sys.executable, "-m", "specdec.coordinator", *flags], log)

    async def is_ready() -> bool:
        return '"event": "ready"' in log.read_text()

    try:
        await eventually(is_ready, "the coordinator is ready", PATIENCE_S)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


async def tokens_of(address: str) -> list[list[int]]:
    async with Client(address) as client:
        done: list[Completion] = [await client.complete(body) for body in requests()]
    return [list(completion.choices[0].token_ids) for completion in done]


@pytest.fixture(scope="module")
def of_one_process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of a target in one process."""
    folder = tmp_path_factory.mktemp("one")

    async def run() -> list[list[int]]:
        target = Target(model, folder, ("--host", "127.0.0.1"), port=free_port())
        process = started_here(target.command(), folder / "target.log")
        try:
            async with coordinator([target.address], folder) as address:
                return await tokens_of(address)
        finally:
            process.kill()
            process.wait()

    return asyncio.run(run())


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def secured(secret: SecretVolume) -> tuple[str, ...]:
    return ("--tls-dir", str(secret.folder), "--tls-verify-clients")


@pytest.mark.parametrize(
    ("num_nodes", "ranks_per_node", "network"),
    [
        (2, 1, Network(delay_s=0.001)),
        (2, 2, Network(delay_s=0.010)),
        (2, 1, Network(delay_s=0.001, loss=0.02)),
        (4, 1, Network(delay_s=0.001)),
        (4, 1, Network(delay_s=0.010, jitter_s=0.002, loss=0.005)),
    ],
)
async def test_ranks_over_machines_give_the_tokens_of_one_process(
    num_nodes: int,
    ranks_per_node: int,
    network: Network,
    model: Path,
    secret: SecretVolume,
    of_one_process: list[list[int]],
    stack: ExitStack,
    tmp_path: Path,
) -> None:
    made = stack.enter_context(machines(num_nodes))
    for machine in made:
        machine.delay_s, machine.jitter_s, machine.loss = network.delay_s, network.jitter_s, network.loss
    size = ("--tensor-parallel-size", str(num_nodes * ranks_per_node))
    group = Target(model, tmp_path, (*secured(secret), *size), made)
    group.start()
    await group.is_ready()
    async with coordinator([group.address], tmp_path, secret) as address:
        assert await tokens_of(address) == of_one_process
    for process in group.processes:
        process.send_signal(signal.SIGTERM)
    assert await group.exit_codes() == [0] * num_nodes


def kill_node(group: Target, node: int) -> None:
    group.machines[node].signal_all(signal.SIGKILL)


def freeze_node(group: Target, node: int) -> None:
    group.machines[node].signal_all(signal.SIGSTOP)


def cut_node_off(group: Target, node: int) -> None:
    group.machines[node].is_cut_off = True


@pytest.mark.parametrize("harm", [kill_node, freeze_node, cut_node_off])
async def test_a_stream_goes_on_elsewhere_when_a_node_is_lost_and_the_group_starts_anew(
    harm: object, model: Path, secret: SecretVolume, stack: ExitStack, tmp_path: Path
) -> None:
    assert callable(harm)
    made = stack.enter_context(machines(3))
    size = ("--tensor-parallel-size", "2")
    group = Target(model, tmp_path / "group", (*secured(secret), *size), made[:2])
    other = Target(model, tmp_path / "other", (*secured(secret), *size), made[2:])
    for target in (group, other):
        target.folder.mkdir()
    group.start()
    await group.is_ready()
    body = requests()[1]
    body.sampling.max_tokens = 120
    async with coordinator([group.address, other.address], tmp_path, secret) as address, held_back(address) as client:
        undisturbed = await client.complete(body)
        async with Reading(client, body) as stream:
            await stream.until(20)
            other.start()
            await other.is_ready()
            harm(group, 1)
            completion = await stream.rest()
    assert completion.choices[0].token_ids == undisturbed.choices[0].token_ids
    assert await asyncio.to_thread(group.processes[0].wait, PATIENCE_S) == 1
    if harm is not kill_node:  # the leader ended for lack of the node, which learns it when it can
        group.machines[1].signal_all(signal.SIGCONT)
        assert await asyncio.to_thread(group.processes[1].wait, PATIENCE_S) == 1
        group.machines[1].is_cut_off = False
    await asyncio.to_thread(group.processes[1].wait, PATIENCE_S)
    assert "RankLost: node 1" in group.log(0) or "engine_stalled" in group.log(0)
    group.start()
    await group.is_ready()
    async with coordinator([group.address], tmp_path, secret) as address, Client(address) as client:
        again = await client.complete(body)
    assert again.choices[0].token_ids == undisturbed.choices[0].token_ids


async def test_an_idle_group_ends_with_its_leader_or_a_rank_or_a_frozen_node(
    model: Path, stack: ExitStack, tmp_path: Path
) -> None:
    made = stack.enter_context(machines(2))
    group = Target(model, tmp_path, (*PLAIN, "--tensor-parallel-size", "2"), made)
    group.start()
    await group.is_ready()
    group.machines[0].signal_all(signal.SIGKILL)
    codes = await group.exit_codes()
    assert codes[1] == 1
    group.start()
    await group.is_ready()
    group.machines[1].signal_all(signal.SIGSTOP)
    await group.is_logged(0, "(node_timeout_s)")
    group.machines[1].signal_all(signal.SIGCONT)
    assert await group.exit_codes() == [1, 1]


async def test_nodes_that_differ_are_refused_with_one_reason_and_a_late_one_completes_the_group(
    model: Path, secret: SecretVolume, stack: ExitStack, tmp_path: Path
) -> None:
    made = stack.enter_context(machines(2))
    other = save_tiny_model("llama_wide_heads", tmp_path / "other", seed=5)
    make_tokenizer().save(str(other / "tokenizer.json"))
    turned = shutil.copytree(model, tmp_path / "turned")
    config = json.loads((turned / "config.json").read_text())
    (turned / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    group = Target(model, tmp_path, (*secured(secret), "--tensor-parallel-size", "2"), made)
    group.start({1: ("--max-model-len", "64")})
    await group.is_logged(1, "max_model_len is 64 at node 1 and None at the leader")
    assert await asyncio.to_thread(group.processes[1].wait, PATIENCE_S) == 1
    nodes = ("--nnodes", "2", "--node-rank", "1", "--master-addr", made[0].address)
    for flags, reason in (
        (("--model", str(other)), "node 1 has other weights than the leader"),
        (("--model", str(turned)), "node 1 has another config.json than the leader"),
        (("--tensor-parallel-size", "4"), "tensor_parallel_size is 4 at node 1 and 2 at the leader"),
    ):
        process = made[1].start(group.command(*nodes, *flags), group.log_path(1))
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 1
        assert reason in group.log(1)
        await group.is_logged(0, reason)  # the leader hears of it a moment later
    plain = [flag for flag in group.command(*nodes) if flag not in secured(secret)]
    stranger = made[1].start([*plain, "--allow-unauthenticated", "--load-timeout-s", "5"], tmp_path / "stranger.log")
    assert await asyncio.to_thread(stranger.wait, PATIENCE_S) == 1
    assert "did not let this node join" in (tmp_path / "stranger.log").read_text()
    group.processes[1] = made[1].start(group.command(*nodes), group.log_path(1))
    await group.is_ready()


async def test_nodes_of_other_numerics_do_not_serve_together_and_both_say_why(
    model: Path, secret: SecretVolume, stack: ExitStack, tmp_path: Path
) -> None:
    made = stack.enter_context(machines(2))
    group = Target(model, tmp_path, (*secured(secret), "--tensor-parallel-size", "2"), made)
    group.start(variables={1: (f"{ISA_VARIABLE}=none",)})
    assert await group.exit_codes() == [1, 1]
    for node in (0, 1):
        assert "nnodes: rank 1 computes as" in group.log(node)
        assert not group.is_up(node)


async def test_missing_nodes_are_named_when_the_leader_gives_up(model: Path, stack: ExitStack, tmp_path: Path) -> None:
    made = stack.enter_context(machines(1))
    group = Target(model, tmp_path, (*PLAIN, "--tensor-parallel-size", "4"), made)
    leader = made[0].start(group.command("--nnodes", "4", "--load-timeout-s", "60"), group.log_path(0))
    assert await asyncio.to_thread(leader.wait, PATIENCE_S) == 1
    assert "nnodes: nodes 1, 2, 3 did not join within load_timeout_s" in group.log(0)
