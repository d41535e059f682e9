"""The builds of the native kernels that this machine can run, and a fast compiler of them."""

import platform
from pathlib import Path

from specdec.engine.native.build import find_compiler
from specdec.engine.native.variants import cpu_features, missing_features, variants_for


def runnable_variants() -> list[str]:
    """Names of the variants, the fastest first."""
    return [v.name for v in variants_for(platform.machine()) if not missing_features(v, cpu_features())]


def fast_compiler(folder: Path) -> str:
    """Path of a script in `folder`, for CXX: the machine's own compiler, which optimises nothing here."""
    wrapper = folder / "fast-c++"
    wrapper.write_text(f'#!/bin/sh\nexec {find_compiler()} "$@" -O0\n')
    wrapper.chmod(0o755)
    return str(wrapper)
