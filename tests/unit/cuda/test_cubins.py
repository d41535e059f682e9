"""Kernels compile for GPUs that are not here, and nothing of them is spilled."""

import json
import os
import subprocess
import sys

import pytest


def compiled(*arguments: str) -> list[dict[str, object]]:
    """What ``bench.cubins`` says. A process of its own: in this one, kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.cubins", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_kernels_of_an_8b_model_fit_into_the_registers_of_hopper() -> None:
    rows = compiled("--architectures", "90", "--shapes", "8B")
    assert {row["kernel"] for row in rows} >= {"write_kv_kernel", "attention_kernel", "fold_kernel"}
    assert [row for row in rows if row["spilled_bytes"] or not row["registers"]] == []


@pytest.mark.long
def test_all_kernels_fit_into_the_registers_of_every_architecture() -> None:
    rows = compiled()
    assert {row["architecture"] for row in rows} == {"sm_80", "sm_90", "sm_100"}
