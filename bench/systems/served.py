"""This system in five ways: with speculation, without it in the same deployment, with a draft that the target itself
runs on all cores (together), synchronous, and without a draft on all cores.

*Synchronous speculation* is the nearest that the settings allow. The draft makes one chain of k tokens after the last
committed one and stops (no runners-up, no second head), and the target waits for the whole chain. It differs from the
textbook: the wait is bounded, a chain ends early where its score is too low, and the target verifies only the part that
its cost model accepts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.deployment import MeasuredDeployment, running
from bench.plan import BenchPlan
from bench.prompts import Prompt
from bench.systems.system import Outcome
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.requests import Sampling, run_group

SPECULATION, PLAIN, ALL_CORES = "specdec, speculation", "specdec, plain", "specdec, plain, all cores"
TOGETHER = "specdec, together"
SYNCHRONOUS = "specdec, synchronous"
_TOKENS_BESIDE = 512
"""Tokens of the KV cache for a prompt."""


@dataclass(frozen=True, slots=True)
class Served:
    """A deployment, used with or without speculation."""

    name: str
    setting: str
    address: str
    speculate: bool

    def can_run(self, batch: int, temperature: float) -> bool:
        """True for every batch and temperature."""
        return True

    async def tune(self, prompts: Sequence[Prompt], max_tokens: int) -> Mapping[str, float]:
        """Warm up; there is no setting to choose."""
        await self.run(prompts, Sampling(max_tokens=max_tokens))
        return {}

    async def run(self, prompts: Sequence[Prompt], sampling: Sampling) -> Outcome:
        """Decode prompts at once."""
        found = await run_group(self.address, prompts, sampling, speculate=self.speculate)
        return Outcome(found.tokens_per_s, found.token_ids)


def deployments(plan: BenchPlan) -> dict[str, MeasuredDeployment]:
    """Deployments by the name of the system that runs on them."""
    most_tokens = max(plan.batches) * (plan.max_tokens + _TOKENS_BESIDE)
    usual = MeasuredDeployment(pair=plan.pair, cores=plan.cores, device=plan.device, most_tokens=most_tokens)
    found = {SPECULATION: usual, TOGETHER: dataclasses.replace(usual, placement="together")}
    for num_tokens in plan.sync_tokens:
        found[f"{SYNCHRONOUS}, k = {num_tokens}"] = MeasuredDeployment(
            pair=plan.pair,
            cores=plan.cores,
            device=plan.device,
            most_tokens=most_tokens,
            target={"hold_off_ms": plan.sync_hold_off_ms, "max_draft_tokens": num_tokens},
            draft={
                "max_ahead_tokens": num_tokens,
                "max_draft_tokens": num_tokens,
                "num_siblings": 0,
                "max_heads": 1,
            },
        )
    found[ALL_CORES] = MeasuredDeployment(
        pair=plan.pair, cores=plan.cores, device=plan.device, most_tokens=most_tokens, is_plain=True
    )
    return found


def start(plan: BenchPlan, name: str, stack: AsyncExitStack, progress: Progress) -> list[Served]:
    """Start a deployment that ends with the stack; returns its systems. Raises ClusterFailed."""
    deployment = deployments(plan)[name]
    progress.tell(f"starting {name}")
    address = stack.enter_context(running(deployment, progress)).address
    if name == SPECULATION:
        return [Served(SPECULATION, "", address, True), Served(PLAIN, "", address, False)]
    if name in (TOGETHER, ALL_CORES):
        return [Served(name, "", address, name == TOGETHER)]
    setting = f"hold-off {plan.sync_hold_off_ms:g} ms"
    return [Served(name, setting, address, True)]
