"""Kernels compile for GPUs that are not here: nothing is spilled, and products are the instructions they must be."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import triton

PAGE = Path(__file__).resolve().parents[3] / "bench" / "results" / "cubins.md"
SOURCES = sorted((Path(__file__).resolve().parents[3] / "specdec" / "engine").rglob("*.py"))


def compiled(*arguments: str) -> list[dict[str, object]]:
    """What ``bench.cubins`` says. A process of its own: in this one, kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.cubins", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_products(rows: list[dict[str, object]]) -> None:
    """Ordered products take one matrix instruction on a GPU, whatever the number of rows; its width changes no bit."""
    found: dict[object, set[str]] = defaultdict(set)
    for row in rows:
        if row["kernel"] == "product_kernel" and "float32" not in str(row["shape"]):
            found[row["architecture"]] |= {re.sub(r"n\d+k", "k", each) for each in row["instructions"]}  # type: ignore[attr-defined]
    assert found
    assert {architecture: len(kinds) for architecture, kinds in found.items()} == dict.fromkeys(found, 1), found


def check_page(rows: list[dict[str, object]]) -> None:
    """No kernel needs more than the page says: registers, spilled bytes, shared memory."""
    page = PAGE.read_text()
    if f"as Triton {triton.__version__} compiles them" not in page:
        pytest.skip("the page is of another Triton")
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines() if "|" in line]
    told = {
        (line[0], architecture): tuple(int(number) for number in cell.split(", "))
        for line in lines[2:]
        for architecture, cell in zip(lines[0][1:-1], line[1:], strict=False)
    }
    columns = ("registers", "spilled_bytes", "shared_bytes")
    above = [
        row
        for row in rows
        for most in [told[str(row["kernel"]), str(row["architecture"])]]
        if any(int(str(row[column])) > limit for column, limit in zip(columns, most, strict=True))
    ]
    assert above == [], "python -m bench.cubins --markdown bench/results/cubins.md"


def test_the_kernels_of_an_8b_model_fit_into_the_registers_of_hopper() -> None:
    rows = compiled("--architectures", "90", "--shapes", "8B")
    kernels = {path: re.findall(r"^@triton.*\ndef (\w+_kernel)\(", path.read_text(), re.MULTILINE) for path in SOURCES}
    # No served shape launches the kernel that rounds rows to 8 bits: drafts alone may have such weights.
    assert {row["kernel"] for row in rows} | {"round_rows_kernel"} == {name for of in kernels.values() for name in of}
    assert [row for row in rows if row["spilled_bytes"] or not row["registers"]] == []
    check_products(rows)
    # A loop that waits for each tile of keys, and then for each of values, reads a fraction of what memory gives.
    assert all(row["copies_ahead"] for row in rows if row["kernel"] in ("attention_kernel", "product_kernel"))
    check_page(rows)


@pytest.mark.long
def test_kernels_over_keys_of_8_bits_compile_without_spills_and_multiply_in_the_queries_type() -> None:
    rows = compiled("--architectures", "90", "100", "--shapes", "8B, keys of 8 bits")
    assert [row for row in rows if row["spilled_bytes"]] == []
    products = [str(row["instructions"]) for row in rows if row["kernel"] == "attention_kernel"]
    assert products
    assert not [each for each in products if "e4m3" in each or ("bf16" not in each and "kind::f16" not in each)]


@pytest.mark.long
def test_all_kernels_fit_into_the_registers_of_every_architecture() -> None:
    rows = compiled()
    assert {row["architecture"] for row in rows} == {"sm_80", "sm_90", "sm_100"}
    check_products(rows)
    check_page(rows)
