"""Step times: a roofline for a GPU that is not there, or what `specdec tune` measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specdec.commands.tune.measured import StepTimes
from specdec.plan.inputs.devices import Device, PlanImpossible
from specdec.plan.inputs.models import ModelSizes

# Assumptions, also of bench/roofline.py.
BANDWIDTH_SHARE = 0.9
"""Share of the vendor's bandwidth that weights are read with: what copies reach on an H200 (4.3 of 4.8 TB/s)."""
ATTENTION_SHARE = 0.6
"""Share of the bandwidth that attention reaches for keys and values."""
COMPUTE_SHARE = 0.6
KERNEL_START_S = 1.2e-6
"""Seconds from one kernel of a graph to the next."""
RAMP_S = 3e-6
"""Seconds in which a matrix product's loads begin and end, at less than the bandwidth."""
_KERNELS_PER_LAYER, _KERNELS_BESIDE = 10, 12
_PRODUCTS_PER_LAYER, _PRODUCTS_BESIDE = 4, 1
PLAIN_GAP_S, GAP_S = 80e-6, 250e-6
"""Seconds that a GPU waits for the host between two steps of one sequence: of one row, and of more, by `bench.host` on
a 2-core AMD EPYC."""
GAP_OF_STREAM_S = 18e-6
"""Seconds that each sequence but the first adds to the wait of plain steps, by `bench.host`."""
_MOST_DEPTHS = 64
ALL_REDUCE_S = 12e-6
"""Seconds of a sum over ranks, of a few rows over NVLink; a layer has two."""


class StepTable(Protocol):
    """Seconds of a replica's step."""

    def seconds(self, num_sequences: int, num_rows: int) -> float:
        """Seconds of a step over `num_sequences`, `num_rows` rows in all, with the time outside of steps."""

    def prompt_seconds(self, num_rows: int, num_sequences: int) -> float:
        """Seconds that `num_rows` rows of prompts add to a step over `num_sequences` that decode; 0: a step of them."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The longer one of memory and arithmetic, at a share of the vendor's figures, and the starts of kernels."""

    model: ModelSizes
    device: Device
    num_ranks: int = 1
    context: int = 1024
    """Tokens of a sequence whose keys and values a step reads, on average."""
    _known: dict[tuple[int, int], float] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, num_sequences: int, num_rows: int) -> float:
        """See `StepTable.seconds`."""
        known = self._known.get((num_sequences, num_rows))
        if known is None:
            known = self._known[num_sequences, num_rows] = self._computed(num_sequences, num_rows)
        return known

    def prompt_seconds(self, num_rows: int, num_sequences: int) -> float:
        """See `StepTable.prompt_seconds`."""
        if not num_sequences:
            return self.seconds(1, num_rows)
        return max(
            0.0, self.seconds(num_sequences, num_sequences + num_rows) - self.seconds(num_sequences, num_sequences)
        )

    def _computed(self, num_sequences: int, num_rows: int) -> float:
        model, ranks = self.model, self.num_ranks
        num_bytes = model.read_bytes(num_rows) + model.activation_bytes * num_rows
        attention = 4.0 * num_rows * self.context * model.heads * model.head_dim * model.layers
        kv_bytes = model.kv_bytes * self.context * num_sequences
        of_memory_s = (num_bytes / BANDWIDTH_SHARE + kv_bytes / ATTENTION_SHARE) / ranks / self.device.bandwidth
        of_arithmetic_s = (model.flops_per_row * num_rows + attention) / ranks / (self.device.flops * COMPUTE_SHARE)
        kernels_s = (_KERNELS_PER_LAYER * model.layers + _KERNELS_BESIDE) * KERNEL_START_S
        kernels_s += (_PRODUCTS_PER_LAYER * model.layers + _PRODUCTS_BESIDE) * RAMP_S
        sums_s = 2 * model.layers * ALL_REDUCE_S if ranks > 1 else 0.0
        gap_s = (PLAIN_GAP_S if num_rows <= num_sequences else GAP_S) + (num_sequences - 1) * GAP_OF_STREAM_S
        return max(of_memory_s, of_arithmetic_s) + kernels_s + sums_s + gap_s

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights, in nine tenths of the memory; below 1: none does."""
        room = 0.9 * self.device.memory * self.num_ranks - self.model.weight_bytes
        return int(room // self.model.kv_bytes)


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Steps of `specdec tune`, with its time outside of steps."""

    times: StepTimes
    outside_ms: Mapping[int, float] = field(default_factory=dict)
    """Between two steps of one row per sequence, by sequences; empty: none."""
    verifying_ms: Mapping[int, float] = field(default_factory=dict)
    """Between two steps with more rows; empty: as `outside_ms`."""
    prompt_ms: Mapping[int, float] = field(default_factory=dict)
    """Of a step over one prompt's chunk, by its tokens; empty: as rows that are verified."""

    def seconds(self, num_sequences: int, num_rows: int) -> float:
        """See `StepTable.seconds`; between measured points the time is interpolated."""
        least_ms = min(ms for rows in self.times.ms.values() for ms in rows.values())
        rows_each = max(1.0, num_rows / num_sequences)
        low = math.floor(rows_each)
        outside_ms = self._outside_ms(num_sequences, is_verifying=num_rows > num_sequences)
        below, above = self.times.of(num_sequences, low), self.times.of(num_sequences, low + 1)
        return (max(least_ms, below + (above - below) * (rows_each - low)) + outside_ms) / 1e3

    def prompt_seconds(self, num_rows: int, num_sequences: int) -> float:
        """See `StepTable.prompt_seconds`."""
        row_ms = self.times.of(1, 1)
        if self.prompt_ms:
            alone_ms = max(row_ms, StepTimes({1: {1: row_ms, **self.prompt_ms}}).of(1, num_rows))
        else:
            alone_ms = 1e3 * self.seconds(1, num_rows) - self._outside_ms(1, is_verifying=num_rows > 1)
        begins_ms = self._outside_ms(1, is_verifying=False)
        return (alone_ms + begins_ms if not num_sequences else max(0.0, alone_ms - row_ms)) / 1e3

    def _outside_ms(self, num_sequences: int, *, is_verifying: bool) -> float:
        """Between measured numbers of sequences by interpolation; beyond them as the nearest one's."""
        ms = self.verifying_ms if is_verifying and self.verifying_ms else self.outside_ms
        if not ms:
            return 0.0
        known = sorted(ms)
        return float(np.interp(num_sequences, known, [ms[each] for each in known]))


@dataclass(frozen=True, slots=True)
class Measured:
    """A pair as `specdec tune --report` wrote it."""

    target: MeasuredSteps
    draft: MeasuredSteps
    acceptance: Sequence[float]
    """By depth, each given that those before it were accepted."""


def read_measured(path: Path, temperature: float) -> Measured:
    """The measurement in specdec-tune.json. Raises PlanImpossible, which names the missing part."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        found = report["tune"]
        plain, verifying, drafting = (
            {int(load): float(ms) for load, ms in each.items()}
            for each in (
                found["outside_ms"],
                found.get("outside_verifying_ms", {}),  # not in reports of earlier releases
                found.get("outside_drafting_ms", {}),
            )
        )
        survivals = {float(at): by_mode["coupled"] for at, by_mode in found["survival"].items()}
        target, draft = (
            MeasuredSteps(_times(found[f"{role}_step_ms"]), prompt_ms=_prompt_ms(found.get(f"{role}_prompt_ms", {})))
            for role in ("target", "draft")
        )
        acceptances = {at: conditional([_share(each) for each in found]) for at, found in survivals.items()}
        if not all(math.isfinite(ms) and ms >= 0 for each in (plain, verifying, drafting) for ms in each.values()):
            raise ValueError("a time of outside_ms from 0")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{error} is missing or no number"
        raise PlanImpossible(f"{path}: {why}; `specdec tune --report FOLDER` writes specdec-tune.json") from error
    if temperature not in acceptances:
        known = ", ".join(f"{at:g}" for at in acceptances)
        raise PlanImpossible(f"{path} has no acceptance at temperature {temperature:g}, only at {known}")
    target, draft = replace(target, outside_ms=plain, verifying_ms=verifying), replace(draft, outside_ms=drafting)
    return Measured(target, draft, acceptances[temperature])


def _times(ms: Mapping[str, Any]) -> StepTimes:
    times = StepTimes({int(count): {int(rows): float(each) for rows, each in row.items()} for count, row in ms.items()})
    if not times.ms or not all(times.ms.values()):
        raise ValueError("a step time")
    if not all(math.isfinite(each) and each > 0 for rows in times.ms.values() for each in rows.values()):
        raise ValueError("a step time above 0")
    return times


def _share(value: object) -> float:
    share = float(str(value))
    if not 0 <= share <= 1:
        raise ValueError("a share of survival from 0 to 1")
    return share


def _prompt_ms(ms: Mapping[str, Any]) -> dict[int, float]:
    """Of a report before prompts were measured: none."""
    found = {int(rows): float(each) for rows, each in ms.items()}
    if not all(rows > 1 and math.isfinite(each) and each > 0 for rows, each in found.items()):
        raise ValueError("a prompt's time above 0")
    return found


def conditional(survival: Sequence[float]) -> list[float]:
    """Acceptance of each depth given the one before, from the shares of rounds that reach each depth."""
    found, above = [], 1.0
    for share in survival:
        if above <= 0:
            break
        found.append(min(1.0, max(0.0, share / above)))
        above = share
    return found or [0.0]


def acceptance_of(text: str) -> list[float]:
    """Shares by depth of a flag's value. Raises PlanImpossible."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or len(found) > _MOST_DEPTHS or not all(0 <= share <= 1 for share in found):
        words = "must be shares from 0 to 1 by depth, such as 0.8,0.75,0.7: each if the tokens before were accepted"
        raise PlanImpossible(f"acceptance {text[:40]!r} {words}")
    return found
