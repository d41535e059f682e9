"""Write the table of what each service takes of its shipped memory limit: `python -m tests.costs.memory [SECONDS]`.

Each service runs in a memory cgroup with the limit of deploy/compose.yaml (root needed), while ten tenants send at once
the most expensive requests that are legal, and some that are not. Memory is what the cgroup counts, without page cache
that is not in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import httpx2
import yaml

from specdec.client import Client, ClientSettings
from specdec.commands.up.cluster import RoleSettings, free_port, service_spec
from specdec.commands.up.service_process import ServiceProcess
from specdec.coordinator.intake.callers import TENANT_KEY
from specdec.v1 import coordinator_pb2 as api

MIB = 2**20
NUM_AT_ONCE = 4
"""Requests of a tenant at once."""
SAMPLE_S = 0.25
ROOT = Path("/sys/fs/cgroup/memory")
COMPOSE = Path(__file__).parents[2] / "deploy/compose.yaml"
MODELS = Path(__file__).parents[2] / "models"
_UNITS = {"m": MIB, "g": 2**30}
_log = sys.stderr.write


@dataclass
class Limited:
    """A service in a cgroup of its own (version 1)."""

    process: ServiceProcess
    folder: Path
    limit: int
    samples: list[int] = field(default_factory=list)

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "memory.limit_in_bytes").write_text(str(self.limit))
        self.process.start()
        (self.folder / "cgroup.procs").write_text(str(self.process.pid))  # it has not begun to import

    def sample(self) -> None:
        self.samples.append(self._read("memory.usage_in_bytes") - self._stat("total_inactive_file"))

    @property
    def num_killed(self) -> int:
        lines = (self.folder / "memory.oom_control").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def end(self) -> None:
        self.process.kill()
        for _ in range(50):
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)

    def _read(self, name: str) -> int:
        return int((self.folder / name).read_text())

    def _stat(self, name: str) -> int:
        lines = (self.folder / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def shipped_limits() -> dict[str, int]:
    """Bytes by service, as deploy/compose.yaml has them."""
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    told = {name: services[name]["deploy"]["resources"]["limits"]["memory"] for name in ROLES}
    found = {name: re.search(r"(\d+)([mg])\}?$", text) for name, text in told.items()}
    return {name: int(match[1]) * _UNITS[match[2]] for name, match in found.items() if match is not None}


ROLES = ("target", "draft", "coordinator", "gateway")


@asynccontextmanager
async def deployment(folder: Path) -> AsyncIterator[tuple[dict[str, Limited], str, str]]:
    """The four services with Compose's limits: by name, and the addresses of coordinator and gateway."""
    ports, limits = {role: free_port() for role in ROLES}, shipped_limits()
    settings: dict[str, dict[str, object]] = {
        "target": {"model": MODELS / "target", "num_threads": 1},
        "draft": {"model": MODELS / "draft", "num_threads": 1, "link_targets": f"127.0.0.1:{ports['target']}"},
        "coordinator": {"targets": f"127.0.0.1:{ports['target']}", "drafts": f"127.0.0.1:{ports['draft']}"},
        "gateway": {"coordinators": f"127.0.0.1:{ports['coordinator']}"},
    }
    services = {}
    for role in ROLES:
        overrides = RoleSettings(overrides={"metrics_port": None, **settings[role]})
        process = ServiceProcess(
            service_spec(role, role, ports[role], overrides, environment={}), folder / f"{role}.log"
        )
        services[role] = Limited(process, ROOT / f"specdec-{role}", limits[role])
    try:
        for service in services.values():
            service.start()
        coordinator = f"127.0.0.1:{ports['coordinator']}"
        async with asyncio.timeout(300), Client(coordinator) as client:
            while not await client.is_serving():  # noqa: ASYNC110 - it is asked over the wire
                await asyncio.sleep(0.5)
        yield services, coordinator, f"http://127.0.0.1:{ports['gateway']}"
    finally:
        for service in services.values():
            service.end()


def generate(**fields: object) -> api.GenerateRequest:
    """A request; `sampling` as a dictionary."""
    return api.GenerateRequest(**fields)  # type: ignore[arg-type]


def requests(rng: random.Random) -> dict[str, Callable[[], api.GenerateRequest]]:
    """By tenant: what it asks over gRPC."""

    def ids(num: int) -> api.TokenIds:
        return api.TokenIds(token_ids=[rng.randrange(5, 4_000) for _ in range(num)])

    def conversation() -> api.ChatMessages:
        """As many values of JSON as may be, and nearly 4 MiB of them, of which the template shows nothing."""
        parts = json.dumps({"annotations": [f"{rng.random():.18f}" * 2] * 48})
        return api.ChatMessages(messages=[api.ChatMessage(role="user", fields_json=parts)] * 1900)

    def schema() -> str:
        names = [f"f{rng.randrange(10**6)}" for _ in range(200)]
        return json.dumps({"type": "object", "properties": {name: {"type": "string"} for name in names}})

    return {
        "context": lambda: generate(prompt_token_ids=ids(1900), sampling={"n": 16, "max_tokens": 100, "logprobs": 20}),
        "prompt logprobs": lambda: generate(
            prompt_token_ids=ids(1900), prompt_logprobs_in_parts=True,
            sampling={"max_tokens": 50, "prompt_logprobs": 20, "logprobs": 20},
        ),
        "largest messages": lambda: generate(
            messages=conversation(), sampling={"n": 4, "max_tokens": 100, "truncate_prompt_tokens": 1900}
        ),
        "constraints": lambda: generate(
            prompt="x", sampling={"n": 4, "max_tokens": 300, "constraint": {"json_schema": schema()}}
        ),
        "automata": lambda: generate(prompt="x", sampling={
            "n": 4, "max_tokens": 500, "ignore_eos": True,
            "constraint": {"regex": f"([a-z ]*{rng.choice('abcdef')}[a-z ]{{{rng.randrange(8, 14)}}})*"},
        }),
    }  # fmt: skip


def bodies(rng: random.Random) -> dict[str, Callable[[], tuple[str, bytes]]]:
    """By tenant: what it asks over HTTP."""
    text = "def f(x):\n    return x\n" * 380_000
    variables = json.dumps({"x": ["a" * 38] * 95_000})
    return {
        "texts": lambda: ("/v1/completions", json.dumps({"prompt": f"{rng.random()}{text[: 7 * MIB]}"}).encode()),
        "conversations": lambda: ("/v1/chat/completions", (
            f'{{"messages":[{{"role":"user","content":"f"}}],"max_tokens":50,"chat_template_kwargs":{variables}}}'
        ).encode()),
        "whole answers": lambda: ("/v1/completions", json.dumps(
            {"prompt": ["x"] * 16, "n": 2, "max_tokens": 400, "logprobs": 5, "ignore_eos": True}).encode()),
        "streams": lambda: ("/v1/completions", json.dumps(
            {"prompt": "def f(", "n": 16, "max_tokens": 1500, "logprobs": 20, "ignore_eos": True, "stream": True}
        ).encode()),
        "tokens": lambda: ("/tokenize", json.dumps({"prompt": text[: 600_000]}).encode()),
    }  # fmt: skip


async def load(coordinator: str, gateway: str, until_s: float) -> None:
    """Ten tenants, each with one kind of request again and again."""
    rng = random.Random(1)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx2.AsyncClient(base_url=gateway, timeout=60.0))
        client = await stack.enter_async_context(Client(coordinator, ClientSettings()))

        async def over_grpc(tenant: str, make: Callable[[], api.GenerateRequest]) -> None:
            as_tenant = client.on_behalf_of(((TENANT_KEY, tenant),))
            async for _ in as_tenant.generate(make()):
                if time.monotonic() > until_s or rng.random() < 0.002:  # it leaves
                    return

        async def over_http(tenant: str, make: Callable[[], tuple[str, bytes]]) -> None:
            path, body = make()
            headers = {"content-type": "application/json", "specdec-tenant": tenant}
            answer = await http.post(path, content=body, headers=headers)
            answers[f"{tenant}: {answer.status_code}"] = answers.get(f"{tenant}: {answer.status_code}", 0) + 1

        async def again(tenant: str, call: Callable[[], Awaitable[None]]) -> None:
            while time.monotonic() < until_s:
                outcome = f"{tenant}: ended"
                try:
                    async with asyncio.timeout(60):
                        await call()
                except Exception as error:
                    outcome = f"{tenant}: {getattr(error, 'reason', type(error).__name__)}"
                    await asyncio.sleep(0.2)
                answers[outcome] = answers.get(outcome, 0) + 1

        answers: dict[str, int] = {}
        async with asyncio.TaskGroup() as tasks:
            for tenant, make in requests(rng).items():
                for _ in range(NUM_AT_ONCE):
                    tasks.create_task(again(tenant, lambda t=tenant, m=make: over_grpc(t, m)))  # type: ignore[misc]
            for tenant, body in bodies(rng).items():
                for _ in range(NUM_AT_ONCE):
                    tasks.create_task(again(tenant, lambda t=tenant, m=body: over_http(t, m)))  # type: ignore[misc]
        _log(json.dumps(answers, indent=1, sort_keys=True) + "\n")


async def run(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with deployment(Path(folder)) as (services, coordinator, gateway):
            for service in services.values():
                service.sample()
            until_s = time.monotonic() + seconds
            loading = asyncio.create_task(load(coordinator, gateway, until_s))
            while not loading.done():
                await asyncio.sleep(SAMPLE_S)
                for service in services.values():
                    service.sample()
            await loading
            sys.stdout.write(
                "| service | limit | at the start | most | mean of each quarter | killed |\n|---|---|---|---|---|---|\n"
            )
            for name, one in services.items():
                told = [value / MIB for value in one.samples]
                size = max(1, len(told) // 4)
                quarters = ", ".join(f"{mean(told[at : at + size]):.0f}" for at in range(0, 4 * size, size))
                cells = (
                    name,
                    f"{one.limit // MIB} MiB",
                    f"{told[0]:.0f} MiB",
                    f"{max(told):.0f} MiB",
                    f"{quarters} MiB",
                    str(one.num_killed),
                )
                sys.stdout.write(f"| {' | '.join(cells)} |\n")
                _log((Path(folder) / f"{name}.log").read_text()[-1500:] + "\n")


if __name__ == "__main__":
    asyncio.run(run(float(sys.argv[1]) if len(sys.argv) > 1 else 240.0))
