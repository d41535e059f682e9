"""What a machine has, and what it lacks for a slot: told before anything large is imported."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.gpu_slot.running import Entry

_QUERIED = "name,memory.total,driver_version,compute_mode,mig.mode.current,power.limit"
_IMAGE = ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers")
"""Packages that are not carried: the machine's image has them."""
_CARRIED = Path(__file__).with_name("packages.txt")


def machine(paths: list[str], *, dry: bool) -> Entry:
    """Packages, with those of further folders, GPU, driver, compiler, MPS, and room on disks."""
    found = metadata.distributions(path=[*paths, *sys.path])
    disks = [path for path in (Path.home(), Path("/dev/shm"), Path("/tmp")) if path.is_dir()]
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "gcc"  # as Triton chooses
    return {
        "dry": dry,
        "python": sys.version,
        "packages": {re.sub("[-_.]+", "-", each.name or "").lower(): each.version for each in reversed([*found])},
        "gpu": _told_by("nvidia-smi", f"--query-gpu={_QUERIED}", "--format=csv,noheader,nounits"),
        "compiler": _told_by(compiler, "--version"),
        "Python.h": (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        "mps": shutil.which("nvidia-cuda-mps-control"),
        "free GiB": {str(path): shutil.disk_usage(path).free >> 30 for path in disks},
    }


def lacking(found: Entry) -> list[str]:
    """What steps cannot do without, each with its remedy; of a dry slot only the packages."""
    has: dict[str, Any] = found["packages"]
    lacks = []
    if none := [name for name in _IMAGE if name not in has]:
        lacks.append(f"{', '.join(none)}: use the python3 that has torch for CUDA (GPU_PYTHON)")
    if none := [name for name in _CARRIED.read_text().split() if name not in has]:
        lacks.append(f"{', '.join(none)}: `make gpu-wheels` where there is a network, then --wheels")
    if found["dry"]:
        return lacks
    if not found["gpu"]:
        lacks.append("a GPU: nvidia-smi does not answer, so a driver or a device is missing")
    if not found["compiler"]:
        lacks.append("a C compiler, without which Triton runs nothing: gcc, or CC")
    if not found["Python.h"]:
        lacks.append(f"Python.h in {sysconfig.get_paths()['include']}, which Triton compiles with: python3-dev")
    return lacks


def _told_by(*command: str) -> str | None:
    """First line of a tool's output; None: it is not there, or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
