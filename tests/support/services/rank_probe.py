"""Ranks that load models and run scenarios on them: ``python -m tests.support.services.rank_probe JSON``.

All ranks run the same program. Each writes the logits of one prefill per model, and rank 0 the number of rows that have
other bits in the other scenarios. At the end rank 0 waits for the idle others and writes the waiting time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.engine.model import building
from specdec.engine.model.runner import ModelRunner
from specdec.engine.parallel.rank_group import RankGroup, device_of_rank, local_store
from specdec.engine.settings import EngineSettings
from specdec.service.process import die_with_parent
from tests.support.engine import paged_scenarios as play

PROMPT = 19
RANDOM = "random"
"""Name of the model with random weights and no checkpoint."""
TIMEOUT_S = 100.0
SILENCE_S = 0.5
"""Seconds that a group waits for silent ranks."""
SILENCE_FILE = "silence"
"""File with the seconds that rank 0 waited; missing if the collective did not fail."""


@dataclass(frozen=True)
class ProbeReport:
    """Results of one model."""

    numerics_id: str
    row_invariant: bool
    num_parameters: int
    num_kv_bytes: int
    """Bytes of one rank's KV cache."""
    num_rows: int
    """Rows compared with the prefill."""
    num_unequal: int
    """Rows whose bits differ from the prefill's."""


def tokens_of(vocab_size: int) -> list[int]:
    """Tokens of the prefill."""
    return play.random_tokens(41, 5, vocab_size)


def batched_ways(runner: ModelRunner) -> dict[str, play.Log]:
    """Logs of the tokens in other chunks, beside other sequences and from the prefix cache: a few steps."""
    tokens = tokens_of(runner.vocab_size)
    return {
        "chunks of 13": play.play_alone(runner, tokens, max_batch_tokens=13),
        "batch of 16": play.play_in_batch(runner, tokens, _others(runner)),
        "cache hit": play.play_cache_hit(runner, tokens),
    }


def few_ways(runner: ModelRunner) -> dict[str, play.Log]:
    """Logs of the tokens in two other ways, for interpreted kernels, which are slow."""
    tokens = tokens_of(runner.vocab_size)
    return {
        "chunks of 13": play.play_alone(runner, tokens, max_batch_tokens=13),
        "tree nodes": play.play_trees(runner, tokens[:16], 13, play.random_tokens(3, 6, runner.vocab_size)),
    }


def on_triton() -> None:
    """From now on load models as on a GPU, with interpreted kernels, and replays that run steps again."""
    from triton.runtime import interpreter

    from specdec.engine.cuda.buckets import BucketedSteps
    from tests.support.engine.captures import Captures
    from tests.support.engine.triton_device import ordered_dot

    def replays(step_model: Any, cache: Any, max_len: int, *, is_alone: bool) -> BucketedSteps:
        steps = BucketedSteps(step_model, cache, Captures(), max_len)
        return steps

    interpreter.InterpreterBuilder.create_dot = ordered_dot
    vars(building)["is_on_gpu"] = lambda device: True
    vars(building)["with_replays"] = replays


def sequential_ways(runner: ModelRunner) -> dict[str, play.Log]:
    """Logs of the tokens in every other way that an engine has: many steps."""
    tokens = tokens_of(runner.vocab_size)
    wrong = play.random_tokens(6, 6, runner.vocab_size)
    return {
        "plain decode": play.play_decodes(runner, tokens, PROMPT),
        "tree nodes": play.play_trees(runner, tokens, PROMPT, wrong),
        "after a rollback": play.play_rollback(runner, tokens, PROMPT, wrong),
        "fork": play.play_fork(runner, tokens, PROMPT, wrong),
        "preemption": play.play_preemption(runner, tokens, PROMPT, _others(runner)[-1]),
    }


def _others(runner: ModelRunner) -> list[list[int]]:
    return [play.random_tokens(3 + 2 * i, 10 + i, runner.vocab_size) for i in range(15)]


def run_ranks(
    size: int,
    models: Mapping[str, Path],
    folder: Path,
    in_every_way: Sequence[str] = (),
    device: str = "cpu",
    dtype: str = "auto",
    *,
    is_on_triton: bool = False,
    deterministic: bool | None = None,
) -> dict[str, ProbeReport]:
    """Run the probe on ``size`` ranks; logits go to ``folder``/NAME-RANK.npy. Raises AssertionError if a process fails.

    Only models of ``in_every_way`` are computed in `sequential_ways`. ``is_on_triton``: use interpreted GPU kernels.
    """
    plan = {
        "size": size,
        "folder": str(folder),
        "models": {name: str(path) for name, path in models.items()},
        "in_every_way": list(in_every_way),
        "device": device,
        "dtype": dtype,
        "is_on_triton": is_on_triton,
        "deterministic": deterministic,
    }
    command = [sys.executable, "-m", "tests.support.services.rank_probe", json.dumps(plan)]
    done = subprocess.run(
        command,
        # The NVML check does not initialize CUDA, which must not happen before the ranks are forked.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reports = json.loads((folder / "reports.json").read_text())
    return {name: ProbeReport(**report) for name, report in reports.items()}


def engine_settings(model: Path | str, **settings: Any) -> EngineSettings:
    """Engine settings of the probe and of its references."""
    base = {"model": str(model), "device": "cpu", "num_blocks": 256, "max_model_len": 128}
    return EngineSettings.model_validate({**base, **settings})


def load_format_of(name: str) -> dict[str, str]:
    """Setting of a model's load format by its name."""
    return {"load_format": "dummy"} if name == RANDOM else {}


def probe(runner: ModelRunner, logits_path: Path, in_every_way: bool, is_slow: bool) -> ProbeReport:
    """Run the scenarios on one model."""
    tokens = tokens_of(runner.vocab_size)
    prefill = play.play_alone(runner, tokens)
    num_rows = num_unequal = 0
    if is_slow:
        ways = few_ways(runner)
    else:
        ways = batched_ways(runner) | (sequential_ways(runner) if in_every_way else {})
    for log in ways.values():
        for path in prefill.keys() & log.keys():
            for row in log[path]:
                num_rows += 1
                num_unequal += not torch.equal(row, prefill[path][0])
    ordered: Sequence[torch.Tensor] = [prefill[tuple(tokens[: i + 1])][0] for i in range(len(tokens))]
    np.save(logits_path, torch.stack(list(ordered)).cpu().numpy())
    return ProbeReport(
        numerics_id=runner.numerics_id,
        row_invariant=runner.row_invariant,
        num_parameters=runner.num_parameters,
        num_kv_bytes=runner.num_kv_bytes,
        num_rows=num_rows,
        num_unequal=num_unequal,
    )


def meet_silence(group: RankGroup, folder: Path) -> None:
    """Let rank 0 ask for a sum in a group whose other ranks do nothing."""
    impatient = RankGroup(group.rank, group.size, group.device, SILENCE_S)
    if group.rank == 0:
        started_s = time.monotonic()
        try:
            impatient.sum(torch.ones(1))
        except RuntimeError:
            (folder / SILENCE_FILE).write_text(str(time.monotonic() - started_s))


def be_rank(plan: dict[str, Any], rank: int) -> None:
    """Run one rank."""
    folder, size = Path(plan["folder"]), plan["size"]
    device, store = device_of_rank(plan["device"], rank), local_store(folder / "store", size)
    group = RankGroup.join(rank, size, device, store, TIMEOUT_S)
    reports = {}
    own = {name: plan[name] for name in ("device", "dtype", "deterministic")} | {"tensor_parallel_size": size}
    if plan["is_on_triton"]:
        on_triton()
    for name, path in plan["models"].items():
        runner = ModelRunner.load(engine_settings(path, **own, **load_format_of(name)), group)
        logits_path = folder / f"{name}-{rank}.npy"
        reports[name] = asdict(probe(runner, logits_path, name in plan["in_every_way"], plan["is_on_triton"]))
    if rank == 0:
        (folder / "reports.json").write_text(json.dumps(reports))
    if plan["device"] == "cpu":  # where NCCL would end the process
        meet_silence(group, folder)
    group.wait_for_all()


def main() -> int:
    """Fork the ranks, so that torch is imported once, and wait for them; the exit code is 1 if one fails."""
    plan = json.loads(sys.argv[1])
    parent_pid = os.getpid()
    for rank in range(plan["size"]):
        if os.fork() == 0:
            code = 1
            try:
                die_with_parent(parent_pid)
                be_rank(plan, rank)
                code = 0
            except Exception:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)  # torch's teardown would take seconds
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(plan["size"])]
    return 0 if codes == [0] * plan["size"] else 1


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)
