"""Runs the tests of numerics as CPUs with fewer instruction sets run them: `make test-isa`.

Variables cap the instruction sets of the kernels, ATen, oneDNN and MKL (MKL obeys its variable only on Intel's
processors). The output names the selections that this CPU cannot run. With --others, which runs beside "make test-all",
the selection that this CPU runs without a cap is left to that, and one runs at a time. Exits with 1 where one failed.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from specdec.engine.native.variants import ISA_VARIABLE, cpu_features, missing_features, variants_for

ASKED_ISA = "TEST_ISA"
"""Variable with the kernels that a run is for, which a test compares with those that run."""
_FOLDER = "tests/unit/engine"
_TORCH_TESTS = [
    f"{_FOLDER}/test_{name}.py"
    for name in ("torch_kernels", "row_invariance", "model_runner", "mixtures", "latent_attention")
]
_ALL_TESTS = [
    *_TORCH_TESTS,
    *(f"{_FOLDER}/test_{name}.py" for name in ("native_kernels", "noise", "drawing")),
    f"{_FOLDER}/test_kernel_build.py::test_the_kernels_that_run_are_those_that_were_chosen",
]


@dataclass(frozen=True, slots=True)
class Selection:
    """A CPU to imitate: the kernels' instruction set (``none``: no kernels), and the variables of the other caps."""

    name: str
    isa: str
    caps: dict[str, str]


SELECTIONS = (
    Selection("AVX-512", "avx512", {}),
    Selection(
        "AVX2",
        "avx2",
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    ),
    Selection(
        "neither",
        "generic",
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    ),
    Selection("NEON", "neon", {}),
    Selection("no kernels", "none", {}),
    Selection("no kernels, AVX", "none", {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX"}),
)


def why_not(selection: Selection) -> str:
    """Why this machine cannot run a selection; empty if it can."""
    if selection.isa == "none":
        return ""
    variants = {variant.name: variant for variant in variants_for(platform.machine())}
    if selection.isa not in variants:
        return f"{platform.machine()} has no such kernels"
    missing = missing_features(variants[selection.isa], cpu_features())
    return f"this CPU lacks {', '.join(missing)}" if missing else ""


def is_own(selection: Selection) -> bool:
    """Whether a selection has this machine's best kernels and no caps."""
    features = cpu_features()
    best = next(each for each in variants_for(platform.machine()) if not missing_features(each, features))
    return selection.isa == best.name and not selection.caps


def run(selection: Selection) -> bool:
    """Run the tests under a selection and print their output; without kernels, only torch's tests."""
    chosen = [*_TORCH_TESTS, "-k", "torch"] if selection.isa == "none" else _ALL_TESTS
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    more = {ISA_VARIABLE: selection.isa, ASKED_ISA: selection.isa, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    began_s = time.monotonic()
    done = subprocess.run(
        command,
        env={**os.environ, **selection.caps, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    sys.stdout.write(f"-- {selection.name} ({time.monotonic() - began_s:.0f} s)\n{done.stdout}")
    sys.stdout.flush()
    return done.returncode == 0


def main() -> int:
    """Run all selections, two at a time unless beside other tests; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--others", action="store_true", help="leave out what this machine runs without a selection")
    has_others = parser.parse_args().others
    reasons = {each.name: why_not(each) for each in SELECTIONS}
    if has_others:
        reasons |= {each.name: "this machine's own, which make test-all runs" for each in SELECTIONS if is_own(each)}
    chosen = [each for each in SELECTIONS if not reasons[each.name]]
    with ThreadPoolExecutor(1 if has_others else 2) as threads:
        passed = dict(zip((each.name for each in chosen), threads.map(run, chosen), strict=True))
    for name, reason in reasons.items():
        result = f"not run: {reason}" if reason else "passed" if passed[name] else "FAILED"
        sys.stdout.write(f"{name:<16} {result}\n")
    return int(not all(passed.values()))


if __name__ == "__main__":
    sys.exit(main())
