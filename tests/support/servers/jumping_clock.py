"""A wall clock that tests set, of programs that they start."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
_OFFSET = struct.Struct("=q")


class NoCompiler(Exception):
    """No C compiler is installed."""


def compiler() -> str:
    """The C compiler. Raises NoCompiler."""
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise NoCompiler("a jumping clock needs a C compiler: install gcc or clang")
    return found


class JumpingClock:
    """The wall clock of programs that have `environment`. Their monotonic clock is the machine's."""

    def __init__(self, folder: Path) -> None:
        """Write its files to a folder. Raises NoCompiler."""
        library, self._file = folder / "jumping_clock.so", folder / "clock"
        subprocess.run([compiler(), "-O2", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
        self.environment = {"LD_PRELOAD": str(library), "JUMPING_CLOCK": str(self._file)}
        self._file.write_bytes(_OFFSET.pack(0))

    def jump_to(self, offset_s: float) -> None:
        """Go on this many seconds after the machine's clock, or before it."""
        with self._file.open("r+b") as file:  # not exchanged: programs have it mapped
            file.write(_OFFSET.pack(int(offset_s)))
