"""Measures the tokens that one coordinator process relays before it fills its core, and the memory of a stream.

    python -m bench.relay
    python -m bench.relay --streams 64,256 --step-ms 30 --tokens-per-verdict 3

The coordinator is the real one, a process of its own pinned to a core. The target and the draft only speak the
protocol. Every `step_ms` the target commits some tokens of every session with credit, in one frame, as an engine does.
The draft answers every commit with a proposal, which the coordinator relays. Clients read the streams and do not parse
them. The coordinator's metric counts tokens, and the kernel counts CPU time and memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Annotated, Any

import grpc
import psutil
import typer
from rich.console import Console
from rich.table import Table

from specdec.commands.measuring.report import machine
from specdec.commands.up.plan import shipped_model
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

_MAX_OUTPUT_TOKENS = 1 << 16
_CONTEXT = 1 << 18
_NUM_CLIENTS = 2
_PATIENCE_S = 60.0
_PORTS = {"target": 52, "draft": 53, "metrics": 90, "coordinator": 51}
app = typer.Typer(add_completion=False)


@dataclass(slots=True)
class _Session:
    epoch: int
    position: int
    credit: int


class PacedTarget(target_pb2_grpc.TargetServiceServicer):
    """Commits `tokens_per_verdict` tokens of every session every `step_ms`."""

    def __init__(self, identity: pb.ModelIdentity, step_ms: float, tokens_per_verdict: int) -> None:
        self._identity = identity
        self._step_s = step_ms / 1000
        self._num_tokens = tokens_per_verdict

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[pb.GetTokenizerResponse]:  # noqa: N802
        """Send the shipped tokenizer."""
        yield pb.GetTokenizerResponse(tokenizer_json=_tokenizer(), tokenizer_config="{}")

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[target_pb2.VerifyResponse]:  # noqa: N802
        """Serve one coordinator's stream."""
        sessions: dict[str, _Session] = {}
        reader = asyncio.create_task(self._read(requests, sessions))
        try:
            yield target_pb2.VerifyResponse(attached=pb.Attached(identity=self._identity))
            due_s = time.monotonic()
            while True:
                due_s = max(due_s + self._step_s, time.monotonic())
                await asyncio.sleep(due_s - time.monotonic())
                results = [self._step(name, s) for name, s in sessions.items() if s.position < s.credit]
                if results:
                    yield target_pb2.VerifyResponse(results=results)
        finally:
            reader.cancel()

    async def _read(self, requests: Any, sessions: dict[str, _Session]) -> None:
        async for request in requests:
            for entry in request.entries:
                match entry.WhichOneof("entry"):
                    case "open":
                        body = entry.open
                        sessions[entry.session_id] = _Session(entry.epoch, len(body.token_ids), body.credit_position)
                    case "credit":
                        sessions[entry.session_id].credit = entry.credit.position
                    case "close":
                        sessions.pop(entry.session_id, None)

    def _step(self, name: str, session: _Session) -> target_pb2.TargetResult:
        num = self._num_tokens
        verdict = pb.Verdict(
            start_position=session.position,
            token_ids=[3 + (session.position + index) * 7919 % 4000 for index in range(num)],
            origins=[*[pb.ORIGIN_DRAFT] * (num - 1), pb.ORIGIN_BONUS],
            verified_by_depth=[1] * (num - 1),
            num_accepted=num - 1,
            hit=num > 1,
            step_us=int(self._step_s * 1e6),
        )
        session.position += num
        return target_pb2.TargetResult(session_id=name, epoch=session.epoch, verdict=verdict)


class EchoDraft(draft_pb2_grpc.DraftServiceServicer):
    """Answers every commit with a proposal of eight nodes."""

    def __init__(self, identity: pb.ModelIdentity) -> None:
        self._identity = identity

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[draft_pb2.DraftResponse]:  # noqa: N802
        """Serve one coordinator's stream."""
        proposal = pb.Proposal(token_ids=range(8), scores=bytes(8), draft_us=100, path_length=8)
        yield draft_pb2.DraftResponse(attached=pb.Attached(identity=self._identity))
        async for request in requests:
            results = []
            for entry in request.entries:
                if entry.WhichOneof("entry") == "commit":
                    proposal.start_position = entry.commit.start_position + len(entry.commit.token_ids)
                    encoded = proposal.SerializeToString()
                    results.append(
                        draft_pb2.DraftResult(session_id=entry.session_id, epoch=entry.epoch, proposal=encoded)
                    )
            if results:
                yield draft_pb2.DraftResponse(results=results)


@app.command(hidden=True)
def replicas(base_port: int, step_ms: float, tokens_per_verdict: int) -> None:
    """Serve the target and the draft until killed."""
    asyncio.run(_serve_replicas(base_port, step_ms, tokens_per_verdict))


async def _serve_replicas(base_port: int, step_ms: float, tokens_per_verdict: int) -> None:
    identity = pb.ModelIdentity(
        name="paced", weights_digest="w", tokenizer_digest="t", vocab_size=4096, max_model_len=_CONTEXT
    )
    servers = []  # a server without references is stopped
    for role in ("target", "draft"):
        server = grpc.aio.server(options=[("grpc.http2.min_ping_interval_without_data_ms", 1000)])
        if role == "target":
            target = PacedTarget(identity, step_ms, tokens_per_verdict)  # type: ignore[abstract]
            target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
        else:
            draft_pb2_grpc.add_DraftServiceServicer_to_server(EchoDraft(identity), server)  # type: ignore[abstract]
        server.add_insecure_port(f"127.0.0.1:{base_port + _PORTS[role]}")
        await server.start()
        servers.append(server)
    await asyncio.Event().wait()


@app.command(hidden=True)
def clients(base_port: int, num_streams: int, prompt_tokens: int) -> None:
    """Read `num_streams` streams until killed."""
    asyncio.run(_read_streams(f"127.0.0.1:{base_port + _PORTS['coordinator']}", num_streams, prompt_tokens))


async def _read_streams(address: str, num_streams: int, prompt_tokens: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call: grpc.aio.UnaryStreamMultiCallable[api.GenerateRequest, bytes] = channel.unary_stream(
            "/specdec.v1.CoordinatorService/Generate", request_serializer=api.GenerateRequest.SerializeToString
        )

        async def read(seed: int) -> None:
            request = api.GenerateRequest(sampling=api.SamplingParams(seed=seed, max_tokens=_MAX_OUTPUT_TOKENS))
            request.prompt_token_ids.token_ids.extend(3 + (seed + index) % 4000 for index in range(prompt_tokens))
            async for _ in call(request):
                pass

        await asyncio.gather(*(read(seed) for seed in range(num_streams)))


@app.command()
def measure(
    streams: Annotated[str, typer.Option(help="Comma-separated numbers of streams at once.")] = "64,256,512",
    step_ms: Annotated[float, typer.Option(help="Time between two verdicts of a stream.")] = 30.0,
    tokens_per_verdict: Annotated[int, typer.Option(min=1)] = 3,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 1000,
    seconds: Annotated[float, typer.Option(help="Seconds of each measurement.")] = 8.0,
    speculate: Annotated[bool, typer.Option(help="With a draft, whose proposals are relayed.")] = True,
) -> None:
    """Measure and print a table."""
    console = Console()
    console.print_json(json.dumps(machine(sorted(os.sched_getaffinity(0)))))
    table = Table(title=f"one coordinator process: a verdict of {tokens_per_verdict} tokens every {step_ms:g} ms")
    columns = ("streams", "tokens/s offered", "tokens/s relayed", "cores", "CPU us/token", "CPU us/verdict", "RSS MB")
    for column in (*columns, "KB/stream"):
        table.add_column(column, justify="right")
    for num_streams in map(int, streams.split(",")):
        with _system(step_ms, tokens_per_verdict, speculate, num_streams) as (coordinator, base_port):
            idle_bytes = coordinator.memory_info().rss
            with _clients(base_port, num_streams, prompt_tokens):
                _wait_for(base_port, "specdec_coordinator_requests_running", num_streams)
                time.sleep(2)  # lets the cost of their start pass
                before, began_s = _snapshot(coordinator, base_port), time.monotonic()
                time.sleep(seconds)
                after, elapsed_s = _snapshot(coordinator, base_port), time.monotonic() - began_s
                busy_bytes = coordinator.memory_info().rss
        num_tokens, cpu_s = after[0] - before[0], after[1] - before[1]
        offered = num_streams * tokens_per_verdict / step_ms * 1000
        us = 1e6 * cpu_s / num_tokens
        row = (offered, num_tokens / elapsed_s, cpu_s / elapsed_s, us, us * tokens_per_verdict)
        memory = (busy_bytes / 1e6, (busy_bytes - idle_bytes) / num_streams / 1e3)
        table.add_row(str(num_streams), *(f"{value:.4g}" for value in (*row, *memory)))
    console.print(table)


@contextmanager
def _system(step_ms: float, num_tokens: int, speculate: bool, num_streams: int) -> Iterator[tuple[psutil.Process, int]]:
    cores = sorted(os.sched_getaffinity(0))
    base_port = _free_base()
    address = {role: f"127.0.0.1:{base_port + port}" for role, port in _PORTS.items()}
    replica_command = ["replicas", str(base_port), str(step_ms), str(num_tokens)]
    arguments = [
        f"--port={base_port + _PORTS['coordinator']}", f"--metrics-port={base_port + _PORTS['metrics']}",
        f"--targets={address['target']}", f"--max-running={num_streams}", f"--max-tokens-limit={_MAX_OUTPUT_TOKENS}",
        "--host=127.0.0.1", "--log-level=warning", *([f"--drafts={address['draft']}"] if speculate else []),
    ]  # fmt: skip
    with (
        _process([sys.executable, "-m", "bench.relay", *replica_command], cores[1:2]),
        _process([sys.executable, "-m", "specdec.coordinator", *arguments], cores[:1]) as coordinator,
    ):
        for role in ("target", "draft") if speculate else ("target",):
            _wait_for(base_port, f'specdec_coordinator_replicas{{role="{role}",state="ready"}}', 1)
        yield psutil.Process(coordinator.pid), base_port


@contextmanager
def _clients(base_port: int, num_streams: int, prompt_tokens: int) -> Iterator[None]:
    usable = sorted(os.sched_getaffinity(0))
    cores = usable[2:] or usable[1:]
    command = [sys.executable, "-m", "bench.relay", "clients", str(base_port)]
    share = [str(num_streams // _NUM_CLIENTS), str(prompt_tokens)]
    with _process([*command, *share], cores), _process([*command, *share], cores):
        yield


@contextmanager
def _process(command: list[str], cores: list[int]) -> Iterator[Popen[bytes]]:
    process = Popen(command)
    if cores:
        os.sched_setaffinity(process.pid, cores)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _snapshot(coordinator: psutil.Process, base_port: int) -> tuple[float, float]:
    times = coordinator.cpu_times()
    return _metric(base_port, "specdec_coordinator_tokens_total"), times.user + times.system


def _wait_for(base_port: int, sample: str, value: float) -> None:
    ends_s = time.monotonic() + _PATIENCE_S
    while _metric(base_port, sample) < value:
        if time.monotonic() > ends_s:
            raise TimeoutError(f"{sample} did not reach {value}")
        time.sleep(0.1)


def _metric(base_port: int, sample: str) -> float:
    """Sum of the samples with this name, or this name and labels; 0 while nothing answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{base_port + _PORTS['metrics']}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{sample} ", f"{sample}{{")))


def _free_base() -> int:
    """A base port at which all of `_PORTS` are free."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            base: int = probe.getsockname()[1] - 60
        if all(_is_free(base + port) for port in _PORTS.values()):
            return base


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _tokenizer() -> bytes:
    return (Path(shipped_model("target")) / "tokenizer.json").read_bytes()


if __name__ == "__main__":
    app()
