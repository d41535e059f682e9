"""File names of results, and the versions that they were measured with."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path

_PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "tokenizers")


def file_name(pair: str, device: str) -> str:
    """File name of a run's results: the time, the device and the pair."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M")
    short = "-".join(Path(part).name for part in pair.split(":"))
    return f"{stamp}-{device}-{re.sub(r'[^A-Za-z0-9.]+', '-', short)}"


def versions() -> dict[str, str]:
    """Versions of this code, of Python and of the main packages."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "specdec": _revision(), **found}


def _revision() -> str:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        except FileNotFoundError:  # a copy of the checkout may be on a machine without git
            return ""
        return done.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    return f"{commit}, changed" if git("status", "--porcelain", "--untracked-files=no") else commit
