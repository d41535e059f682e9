"""The instruction sets of the kernels' builds, and the choice for this machine.

A variant's lanes decide the order of sums, so that its name is part of the numerics id. No build is specific to one
CPU: equal variants give equal bits on all machines.
"""

import os
import platform
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ISA_VARIABLE = "SPECDEC_NATIVE_ISA"
_AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


class UnsupportedIsa(ValueError):
    """``SPECDEC_NATIVE_ISA`` names a variant that does not exist or that this CPU cannot run."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One build of the kernels."""

    name: str
    flags: tuple[str, ...]
    """Compiler flags (GCC 11 or Clang 12 and later)."""
    needs: frozenset[str] = frozenset()
    """CPU features by their names in /proc/cpuinfo, which lists those that the operating system has enabled."""
    lanes: int = 4
    """Floats per vector."""


_X86_64 = (
    Variant("avx512", ("-march=x86-64-v4",), _AVX512, lanes=16),
    Variant("avx2", ("-march=x86-64-v3",), _AVX2, lanes=8),
    Variant("generic", ("-march=x86-64",)),
)
_AARCH64 = (Variant("neon", ("-march=armv8-a",)),)
_OTHER = (Variant("generic", ()),)


def variants_for(machine: str) -> tuple[Variant, ...]:
    """Variants of a machine type (``platform.machine``), the fastest first; the last one always runs."""
    return {"x86_64": _X86_64, "aarch64": _AARCH64}.get(machine, _OTHER)


def choose_variant() -> Variant | None:
    """The fastest variant that this CPU can run, or the one that ``SPECDEC_NATIVE_ISA`` names; None for ``none``.

    Raises ``UnsupportedIsa``.
    """
    asked = os.environ.get(ISA_VARIABLE, "")
    if asked == "none":
        return None
    machine, features = platform.machine(), cpu_features()
    variants = variants_for(machine)
    if not asked:
        return next(variant for variant in variants if variant.needs <= features)
    names = [variant.name for variant in variants]
    if asked not in names:
        raise UnsupportedIsa(f"{ISA_VARIABLE} is {asked}: on {machine} it must be {', '.join(names)} or none")
    chosen = variants[names.index(asked)]
    if missing := missing_features(chosen, features):
        raise UnsupportedIsa(f"{ISA_VARIABLE} is {asked}: this CPU lacks {', '.join(missing)}")
    return chosen


def missing_features(variant: Variant, features: Collection[str]) -> list[str]:
    """Features that a variant needs and a CPU with `features` lacks, sorted."""
    return sorted(variant.needs.difference(features))


def cpu_features() -> frozenset[str]:
    """The CPU's features as the operating system lists them; empty if it does not."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()
