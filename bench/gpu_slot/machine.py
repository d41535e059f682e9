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

from bench.gpu_slot.running import Entry

_QUERY = "--query-gpu=name,memory.total,driver_version,compute_mode,mig.mode.current,power.limit"
_IMAGE = ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers")
"""Packages that are not carried: the machine's image has them."""
_CARRIED = Path(__file__).with_name("packages.txt")


def machine(paths: list[str], *, dry: bool) -> Entry:
    """Packages, with those of further folders, GPU, driver, compiler, MPS, and room on disks."""
    found = metadata.distributions(path=[*paths, *sys.path])
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "gcc"  # as Triton chooses
    disks = [path for path in (Path.home(), Path("/dev/shm"), Path("/tmp")) if path.is_dir()]
    return {
        "dry": dry,
        "python": sys.version,
        "packages": {re.sub("[-_.]+", "-", each.name or "").lower(): each.version for each in reversed([*found])},
        "gpu": _told_by("nvidia-smi", _QUERY, "--format=csv,noheader,nounits"),
        "compiler": _told_by(compiler, "--version"),
        "Python.h": (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        "mps": shutil.which("nvidia-cuda-mps-control"),
        "free GiB": {str(path): shutil.disk_usage(path).free >> 30 for path in disks},
    }


def lacking(found: Entry) -> list[str]:
    """What steps cannot do without, each with its remedy; of a dry slot only the packages."""
    image, carried = (
        ", ".join(name for name in names if name not in found["packages"])
        for names in (_IMAGE, _CARRIED.read_text().split())
    )
    headers = f"Python.h in {sysconfig.get_paths()['include']}, which Triton compiles with: python3-dev"
    needs = [
        (not image, f"{image}: use the python3 that has torch for CUDA (GPU_PYTHON)"),
        (not carried, f"{carried}: `make gpu-wheels` where there is a network, then --wheels"),
        (found["gpu"] or found["dry"], "a GPU: nvidia-smi does not answer, so a driver or a device is missing"),
        (found["compiler"] or found["dry"], "a C compiler, without which Triton runs nothing: gcc, or CC"),
        (found["Python.h"] or found["dry"], headers),
    ]
    return [remedy for is_there, remedy in needs if not is_there]


def _told_by(*command: str) -> str | None:
    """First line of a tool's output; None: it is not there, or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
