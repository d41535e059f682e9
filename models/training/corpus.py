"""The training text: the Python sources of the running interpreter's standard library.

Every machine that can run this project has them, and the PSF licence allows the use.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Generated tables and other text from which there is nothing to learn, or which names the machine.
EXCLUDED = re.compile(
    r"^site-packages/|^_sysconfigdata|^config-|^pydoc_data/|^encodings/(cp|iso|mac|koi|ptcp|kz|tis|hp|palmos)"
    r"|^idlelib/idle_test/htest|^test/(encoded_modules|cjkencodings)|^lib2to3/tests/data|/bad_|^__phello__"
)
MAX_FILE_BYTES = 200_000
VALIDATION_PERCENT = 3


@dataclass(frozen=True)
class SourceFile:
    """One file: its path below the standard library, and its text."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        """Whether it belongs to CPython's own tests rather than to the library."""
        return bool(re.search(r"(^|/)(idle_)?tests?/", self.path))

    @property
    def is_validation(self) -> bool:
        """Whether it is held out, by a hash of its path: the same on every machine."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < VALIDATION_PERCENT


def read_corpus(root: Path | None = None) -> list[SourceFile]:
    """Return the files in use, ordered by path, without exact duplicates.

    ``root`` defaults to the standard library of the running interpreter. Files that are not
    UTF-8, nearly empty, or larger than MAX_FILE_BYTES are left out.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files: list[SourceFile] = []
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if EXCLUDED.search(name) or "/site-packages/" in name:
            continue
        if not 64 <= path.stat().st_size <= MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text not in seen:
            seen.add(text)
            files.append(SourceFile(name, text))
    return files
