"""Measures both models of a pair, one after the other, each on the cores or device that `specdec up` gives it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.commands.errors import ClusterFailed
from specdec.commands.measuring.requests import Prompt
from specdec.commands.tune.measured import Agreement, StepTimes
from specdec.commands.tune.prediction import Measurements
from specdec.commands.up.cores import assign_cores, share_cores
from specdec.commands.up.devices import count_gpus, plan_devices
from specdec.commands.up.plan import Placement

ROWS = (1, 2, 4, 8, 16, 33)
_PROMPT_ROWS = (32, 128, 512)
_SEQUENCES = (1, 2, 4, 8, 16)
_WORTH = 1.03
"""Ratio of step times up to which half of the cores are enough."""
_END_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlacement:
    """Devices and cores of the engines; on other devices than CPU cores are empty."""

    target_device: str
    draft_device: str
    target_cores: tuple[int, ...]
    draft_cores: tuple[int, ...]
    shared_cores: tuple[int, ...] = ()
    """Cores of all processes but the engines."""
    placement: Placement = "apart"

    @property
    def is_parallel(self) -> bool:
        """Whether the draft computes at the same time as the target, undisturbed by the processes between them."""
        if self.placement == "together":
            return False
        if self.target_device != "cpu":
            return self.target_device != self.draft_device
        return not set(self.draft_cores) & {*self.target_cores, *self.shared_cores}


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Models, prompts and loads to measure."""

    target_model: str
    draft_model: str
    prompts: Sequence[Prompt]
    temperatures: Sequence[float]
    max_tokens: int
    loads: Sequence[int]
    is_translated: bool = False
    """Whether the draft has another tokenizer, and drafts shared tokens."""


def places(device: str, placement: Placement = "apart") -> ProbePlacement:
    """The devices and cores that `specdec up` would choose. Raises ClusterFailed if there is no such device."""
    try:
        devices = plan_devices(device, 0 if device == "cpu" else count_gpus())
    except ValueError as error:
        raise ClusterFailed(str(error)) from error
    usable = sorted(os.sched_getaffinity(0))
    is_apart = placement == "apart"
    cores = assign_cores(usable) if is_apart else share_cores(usable)
    is_cpu = not devices.is_cuda
    return ProbePlacement(
        target_device=devices.targets[0].device,
        draft_device=devices.drafts[0].device if is_apart else devices.targets[0].device,
        target_cores=cores.target_engine if is_cpu else (),
        draft_cores=(cores.draft_engine if is_apart else cores.target_engine) if is_cpu else (),
        shared_cores=cores.shared,
        placement=placement,
    )


def measure_pair(
    questions: Questions, where: ProbePlacement, tell: Callable[[str], None], known: Measurements | None = None
) -> tuple[Measurements, ProbePlacement]:
    """Measure steps and agreement; the places come back with the target on fewer cores where those do as well.

    Agreement does not depend on places, so it is taken from `known`, the measurements at other places.

    Raises ClusterFailed with the engine's error.
    """
    sequences = sorted({*_SEQUENCES[: 1 + sum(count < max(questions.loads) for count in _SEQUENCES)], *questions.loads})
    common = {"prompt_rows": _PROMPT_ROWS, "temperature": max(questions.temperatures)}
    task: dict[str, Any] = common | {"sequences": sequences, "rows": ROWS, "candidates": 1}
    asked = {} if known is not None else {
        "prompts": list(questions.prompts),
        "temperatures": list(questions.temperatures),
        "max_tokens": questions.max_tokens,
    }  # fmt: skip
    settings = _settings(questions.target_model, where.target_device, where.target_cores)
    target = run_probe(task | {"settings": settings} | asked, where.target_cores, tell)
    steps, prompt_ms = _times(target), _prompt_ms(target)
    fewer = where.target_cores[: len(where.target_cores) // 2]
    if fewer and where.placement == "apart":
        settings = _settings(questions.target_model, where.target_device, fewer)
        on_fewer = run_probe(task | {"settings": settings}, fewer, tell)
        other = _times(on_fewer)
        if all(other.of(load, 8) <= _WORTH * steps.of(load, 8) for load in questions.loads):
            steps, where = other, dataclasses.replace(where, target_cores=fewer)
            prompt_ms = _prompt_ms(on_fewer)
    draft = run_probe(
        common
        | {
            "settings": _settings(questions.draft_model, where.draft_device, where.draft_cores),
            "outputs": target.get("outputs", []),
            "sequences": sequences if len(sequences) > 1 else [*sequences, 2 * sequences[0]],
            "rows": [1],
            "candidates": 3,
            "target_model": questions.target_model if questions.is_translated else None,
        },
        where.draft_cores,
        tell,
    )
    if known is not None:
        changed = dataclasses.replace(
            known,
            target=steps,
            draft=_times(draft),
            target_prompt_ms=prompt_ms,
            draft_prompt_ms=_prompt_ms(draft),
            is_parallel=where.is_parallel,
        )
        return changed, where
    if not draft["agreement"]:
        raise ClusterFailed(
            f"no output fits the draft's context of {draft['max_model_len']} tokens: shorten the prompts"
        )
    outputs: dict[float, list[Agreement]] = {temperature: [] for temperature in questions.temperatures}
    for found in draft["agreement"]:
        outputs[found["temperature"]].append(Agreement(tuple(found["ranks"]), tuple(found["overlaps"])))
    measured = Measurements(
        target=steps,
        draft=_times(draft),
        outputs=outputs,
        target_prompt_ms=prompt_ms,
        draft_prompt_ms=_prompt_ms(draft),
        is_parallel=where.is_parallel,
    )
    return measured, where


def _settings(model: str, device: str, cores: Sequence[int]) -> dict[str, Any]:
    return {"model": model, "device": device, "num_threads": max(1, len(cores)), "self_test": False}


def _times(found: Mapping[str, Any]) -> StepTimes:
    return StepTimes({
        int(count): {int(num): float(ms) for num, ms in rows.items()} for count, rows in found["step_ms"].items()
    })  # fmt: skip


def _prompt_ms(found: Mapping[str, Any]) -> dict[int, float]:
    return {int(rows): float(ms) for rows, ms in found["prompt_ms"].items()}


def run_probe(task: Mapping[str, Any], cores: Sequence[int], tell: Callable[[str], None]) -> dict[str, Any]:
    """Run `specdec.commands.tune.probe` on cores; it does not outlive this call. Raises ClusterFailed."""
    command = [sys.executable, "-m", "specdec.service.process", str(os.getpid())]
    command += [",".join(map(str, cores)), "specdec.commands.tune.probe"]
    with tempfile.TemporaryFile("w+") as answers:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=answers,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C reaches this process only, which ends the child
        )
        said: list[str] = []
        try:
            with process:
                if process.stdin is None or process.stderr is None:
                    raise ClusterFailed("the probe has no pipes")
                process.stdin.write(json.dumps(task))
                process.stdin.close()
                for line in process.stderr:
                    said.append(line.rstrip())
                    tell(line.rstrip())
        except BaseException:
            process.kill()
            raise
        answers.seek(0)
        text = answers.read()
    answer: dict[str, Any] = json.loads(text) if text.strip() else {"error": "\n".join(said[-_END_LINES:])}
    if "error" in answer:
        raise ClusterFailed(f"{task['settings']['model']} could not be measured: {answer['error']}")
    return answer
