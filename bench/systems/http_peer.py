"""Another project's server that streams completions over HTTP, started for the bench."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.prompts import Prompt
from bench.systems.system import Clock, LeftOut, Outcome
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.requests import Sampling

_HOST = "127.0.0.1"
_START_S, _STOP_S, _ANSWER_S = 300.0, 10.0, 600.0


class Dialect(Protocol):
    """Form of a server's requests and answers."""

    path: str

    def body(self, prompt: Prompt, sampling: Sampling, seed: int, num_draft_tokens: int | None) -> dict[str, Any]:
        """Body of a request for a streamed answer."""

    def token_ids(self, event: Mapping[str, Any]) -> list[int]:
        """Tokens of one event."""


@dataclass(slots=True)
class HttpPeer:
    """One server with one way to speculate."""

    name: str
    port: int
    dialect: Dialect
    candidates: Sequence[int] = ()
    """Numbers of draft tokens to choose from; empty where requests cannot set it."""
    setting: str = ""
    num_draft_tokens: int | None = None

    def can_run(self, batch: int, temperature: float) -> bool:
        """True for every batch and temperature."""
        return True

    async def tune(self, prompts: Sequence[Prompt], max_tokens: int) -> Mapping[str, float]:
        """Warm up and keep the fastest number of draft tokens."""
        await self.run(prompts[:1], Sampling(max_tokens=max_tokens))
        speeds: dict[int, float] = {}
        for number in self.candidates:
            self.num_draft_tokens = number
            found = [(await self.run([prompt], Sampling(max_tokens=max_tokens))).tokens_per_s for prompt in prompts]
            speeds[number] = sum(found) / len(found)
        if speeds:
            self.num_draft_tokens = max(speeds, key=lambda number: speeds[number])
            self.setting = f"k = {self.num_draft_tokens}"
        return {f"k = {number}": speed for number, speed in speeds.items()}

    async def run(self, prompts: Sequence[Prompt], sampling: Sampling) -> Outcome:
        """Decode prompts at once."""
        began_s = time.perf_counter()
        calls = [asyncio.to_thread(self._complete, prompt, sampling, seed) for seed, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*calls)
        elapsed_s = time.perf_counter() - began_s
        tokens = [token_ids for token_ids, _ in answers]
        speed = answers[0][1].tokens_per_s if len(prompts) == 1 else sum(map(len, tokens)) / elapsed_s
        return Outcome(speed, tokens)

    def _complete(self, prompt: Prompt, sampling: Sampling, seed: int) -> tuple[list[int], Clock]:
        tokens: list[int] = []
        clock = Clock()
        body = self.dialect.body(prompt, sampling, seed, self.num_draft_tokens)
        try:
            for event in _events(self.port, self.dialect.path, body):
                new = self.dialect.token_ids(event)
                tokens += new
                clock.add(len(new), time.perf_counter())
        except (OSError, http.client.HTTPException) as error:
            raise LeftOut(f"{self.name}: {error!r}") from error
        if len(tokens) != sampling.max_tokens:
            raise LeftOut(f"{self.name}: {len(tokens)} tokens instead of {sampling.max_tokens}")
        return tokens, clock


def start_server(
    name: str, command: Sequence[str], port: int, cores: Sequence[int], stack: AsyncExitStack, progress: Progress,
    environment: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Start a server that ends with the stack; returns when it is healthy. Raises LeftOut."""
    log = Path(tempfile.mkdtemp(prefix="specdec-bench-")) / f"{name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            ["taskset", "--cpu-list", ",".join(map(str, cores)), *command],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
    stack.callback(_stop, process)
    ends_s = time.monotonic() + _START_S
    while not _is_healthy(port):
        progress.tell(f"waiting for {name}")
        if process.poll() is not None or time.monotonic() > ends_s:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise LeftOut(f"{name} did not start: {' '.join(last)} (log: {log})")
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a server with all processes that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(_HOST, port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _events(port: int, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of one streamed answer. Raises LeftOut for an error status."""
    connection = http.client.HTTPConnection(_HOST, port, timeout=_ANSWER_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise LeftOut(f"{path} answered {response.status}: {response.read(500)!r}")
        for line in response:
            text = line.decode().strip()
            if text.startswith("data:") and text != "data: [DONE]":
                yield json.loads(text.removeprefix("data:"))
    finally:
        connection.close()
