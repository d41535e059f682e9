"""A file system of a fixed size with a service's log and temporary files, which can be filled. Root only."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

_FILLER = "filler"
_PIECE = bytes(4096)


class NoDisk(Exception):
    """No file system can be mounted here."""


class Disk:
    """Use as a context manager: at its end what is in it is copied to a folder beside it, and it is gone."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.folder = folder
        self._num_bytes = num_bytes

    def __enter__(self) -> Disk:
        self.folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._num_bytes},mode=1777", "none", str(self.folder)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            self.folder.rmdir()
            raise NoDisk(result.stderr.strip())
        return self

    def __exit__(self, *_: object) -> None:
        self.drain()
        for log in self.folder.glob("*.log"):
            shutil.copy(log, self.folder.parent)
        # Lazily: what is killed at the same moment may have files open.
        subprocess.run(["umount", "--lazy", str(self.folder)], check=False)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def fill(self) -> None:
        """Leave no byte."""
        with contextlib.suppress(OSError), (self.folder / _FILLER).open("wb", buffering=0) as filler:
            while filler.write(_PIECE):
                pass

    def drain(self) -> None:
        """Take back `fill`."""
        (self.folder / _FILLER).unlink(missing_ok=True)
