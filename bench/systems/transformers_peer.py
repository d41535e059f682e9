"""transformers: `generate`, assisted generation, prompt look-up."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from bench.plan import BenchPlan
from bench.prompts import Prompt
from bench.systems.system import LeftOut, Outcome
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.requests import Sampling

_LINE_BYTES = 1 << 24
_METHODS = {"generate": "transformers, generate", "assisted": "transformers, assisted",
            "lookup": "transformers, prompt look-up"}  # fmt: skip


class Transformers:
    """One way to generate, in a process that all ways share in turns."""

    def __init__(self, process: asyncio.subprocess.Process, method: str, candidates: Sequence[int]) -> None:
        self.name = _METHODS[method]
        self._process, self._method = process, method
        self._candidates = candidates if method != "generate" else ()
        self._num_draft_tokens = self._candidates[0] if self._candidates else None

    @property
    def setting(self) -> str:
        """Number of draft tokens."""
        return "" if self._num_draft_tokens is None else f"k = {self._num_draft_tokens}"

    def can_run(self, batch: int, temperature: float) -> bool:
        """Speculation in transformers decodes one prompt at a time."""
        return batch == 1 or self._method == "generate"

    async def tune(self, prompts: Sequence[Prompt], max_tokens: int) -> Mapping[str, float]:
        """Warm up and keep the fastest number of draft tokens."""
        speeds: dict[str, float] = {}
        await self.run(prompts[:1], Sampling(max_tokens=max_tokens))
        for number in self._candidates:
            self._num_draft_tokens = number
            found = [(await self.run([prompt], Sampling(max_tokens=max_tokens))).tokens_per_s for prompt in prompts]
            speeds[self.setting] = sum(found) / len(found)
        if speeds:
            best = max(speeds, key=lambda setting: speeds[setting])
            self._num_draft_tokens = self._candidates[list(speeds).index(best)]
        return speeds

    async def run(self, prompts: Sequence[Prompt], sampling: Sampling) -> Outcome:
        """Decode prompts at once."""
        task = {
            "method": self._method,
            "prompts": prompts,
            "max_tokens": sampling.max_tokens,
            "num_draft_tokens": self._num_draft_tokens,
            "temperature": sampling.temperature,
            "seed": 0,
        }
        answer = await _ask(self._process, task)
        return Outcome(answer["tokens_per_s"], answer["token_ids"])


async def start(plan: BenchPlan, stack: AsyncExitStack, progress: Progress) -> list[Transformers]:
    """Start the process, which ends with the stack. Raises LeftOut."""
    progress.tell("starting transformers")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.systems.transformers_worker",
        str(plan.pair.target.folder),
        str(plan.pair.draft.folder),
        plan.device,
        ",".join(map(str, plan.cores)),
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL,
        limit=_LINE_BYTES,
        env={**os.environ, "OMP_NUM_THREADS": str(len(plan.cores))},
    )
    stack.push_async_callback(_stop, process)
    await _ask(process, None)
    return [Transformers(process, method, plan.peer_tokens) for method in _METHODS]


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


async def _ask(process: asyncio.subprocess.Process, task: Mapping[str, object] | None) -> dict[str, Any]:
    if process.stdin is None or process.stdout is None:
        raise LeftOut("transformers: no pipe to its process")
    if task is not None:
        process.stdin.write(json.dumps(task).encode() + b"\n")
        await process.stdin.drain()
    line = await process.stdout.readline()
    answer: dict[str, Any] = json.loads(line) if line else {"error": "its process has ended"}
    if "error" in answer:
        raise LeftOut(f"transformers: {answer['error']}")
    return answer
