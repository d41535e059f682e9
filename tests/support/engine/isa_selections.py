"""Runs the tests of numerics as CPUs with less than this one run them: `make test-isa`.

The variables cap what the kernels, ATen, oneDNN and MKL use (MKL heeds its own on Intel's processors only). What this
CPU cannot run is told by name; with --others, what it runs anyway when nothing is capped is left to "make test-all".
Exits with 1 where a selection failed.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass

from specdec.engine.native.variants import ISA_VARIABLE, cpu_features, missing_features, variants_for

_FOLDER = "tests/unit/engine"
_TORCH_TESTS = [f"{_FOLDER}/test_{name}.py" for name in ("torch_kernels", "row_invariance", "model_runner")]
_ALL_TESTS = [
    *_TORCH_TESTS,
    *(f"{_FOLDER}/test_{name}.py" for name in ("native_kernels", "kernel_build", "noise", "drawing")),
]


@dataclass(frozen=True, slots=True)
class Selection:
    """A machine to stand for: its kernels, none of them for ``none``, and what else is capped."""

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
    """Whether a selection is what this machine runs without one: its best kernels, and nothing capped."""
    features = cpu_features()
    best = next(each for each in variants_for(platform.machine()) if not missing_features(each, features))
    return selection.isa == best.name and not selection.caps


def run(selection: Selection) -> bool:
    """Run the tests under a selection; without kernels, those of torch."""
    chosen = [*_TORCH_TESTS, "-k", "torch"] if selection.isa == "none" else _ALL_TESTS
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *chosen]
    environment = {**os.environ, **selection.caps, ISA_VARIABLE: selection.isa, "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, env=environment).returncode == 0


def main() -> int:
    """Run all selections; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--others", action="store_true", help="leave out what this machine runs without a selection")
    has_others, lines, has_failed = parser.parse_args().others, [], False
    for selection in SELECTIONS:
        reason, started = why_not(selection), time.monotonic()
        if has_others and is_own(selection):
            reason = "this machine's own, which make test-all runs"
        if not reason:
            sys.stdout.write(f"-- {selection.name}\n")
            sys.stdout.flush()
        passed = not reason and run(selection)
        has_failed |= not reason and not passed
        result = f"not run: {reason}" if reason else "passed" if passed else "FAILED"
        lines.append(f"{selection.name:<16} {result} ({time.monotonic() - started:.0f} s)\n")
    sys.stdout.writelines(lines)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
