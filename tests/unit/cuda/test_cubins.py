"""Kernels compile for GPUs that are not here: nothing is spilled, and products are the instructions they must be."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).resolve().parents[3] / "specdec" / "engine" / "cuda").glob("*_kernels.py"))


def compiled(*arguments: str) -> list[dict[str, object]]:
    """What ``bench.cubins`` says. A process of its own: in this one, kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.cubins", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_products(rows: list[dict[str, object]]) -> None:
    """Ordered products take one matrix instruction, whatever the number of rows and the width."""
    products = [row for row in rows if row["kernel"] == "product_kernel"]
    assert {row["variant"] for row in products} == {"deterministic, 8 rows", "deterministic, 512 rows"}
    instructions = {str(row["instructions"]) for row in products}
    assert instructions == {"['mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32']"}


def test_the_kernels_of_an_8b_model_fit_into_the_registers_of_hopper() -> None:
    rows = compiled("--architectures", "90", "--shapes", "8B")
    kernels = {path: re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE) for path in SOURCES}
    assert {row["kernel"] for row in rows} == {name for names in kernels.values() for name in names}
    assert [row for row in rows if row["spilled_bytes"] or not row["registers"]] == []
    check_products(rows)
    # A loop that waits for each tile of keys, and then for each of values, reads a fraction of what memory gives.
    assert all(row["copies_ahead"] for row in rows if row["kernel"] in ("attention_kernel", "product_kernel"))


@pytest.mark.long
def test_all_kernels_fit_into_the_registers_of_every_architecture() -> None:
    rows = compiled()
    assert {row["architecture"] for row in rows} == {"sm_80", "sm_90", "sm_100"}
    check_products(rows)
