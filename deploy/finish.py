"""Finishes an image's environment: `finish.py ENVIRONMENT PYPROJECT [--whole]`.

It writes a bill of materials (CycloneDX) to share/specdec/sbom.cdx.json, for scanners and auditors. Then it removes
files that nothing reads at run time, and symbols of compiled modules. `--whole` removes nothing: what compiles while it
runs reads headers. It runs with the build's Python, which has cyclonedx-py beside it; strip is binutils'.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath

BILL = Path("share", "specdec", "sbom.cdx.json")
_SOURCES = frozenset({".a", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".proto", ".pxd", ".pxi", ".pyi", ".pyx"})
"""What compilers and type checkers read."""
_LIBRARY = re.compile(r"\.so(\.\d+)*$")
_TORCH_TOOLS = frozenset({"bin", "include", "share", "test"})
_TORCH_NEEDS = "torch_shm_manager"
"""The one program of torch that importing it looks for."""


def is_needless(path: PurePath) -> bool:
    """Whether nothing reads this file at run time; its path begins in site-packages."""
    if path.parts[0] == "torch" and path.parts[1:2] and path.parts[1] in _TORCH_TOOLS:
        return path.name != _TORCH_NEEDS
    return path.suffix in _SOURCES or "tests" in path.parts[:-1]


def libraries(folder: Path) -> Iterator[Path]:
    """Compiled modules and libraries, but for those that repair tools rewrote (`NAME.libs`), which strip may break."""
    for path in sorted(folder.rglob("*.so*")):
        is_rewritten = any(part.endswith(".libs") for part in path.relative_to(folder).parts)
        if _LIBRARY.search(path.name) and path.is_file() and not path.is_symlink() and not is_rewritten:
            yield path


def removed(site_packages: Path) -> int:
    """Remove what is needless, and the folders that are then empty; return the number of bytes."""
    num_bytes = 0
    for path in sorted(site_packages.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif is_needless(path.relative_to(site_packages)):
            num_bytes += path.lstat().st_size
            path.unlink()
    return num_bytes


def stripped(site_packages: Path) -> int:
    """Remove symbols that no loader reads; return the number of bytes. Raises CalledProcessError."""
    num_bytes = 0
    for path in libraries(site_packages):
        before = path.stat().st_size
        subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)
        num_bytes += before - path.stat().st_size
    return num_bytes


def write_bill(environment: Path, pyproject: Path) -> None:
    """Write the bill of materials into the environment that it lists. Raises CalledProcessError."""
    bill = environment / BILL
    bill.parent.mkdir(parents=True, exist_ok=True)
    tool = Path(sys.executable).with_name("cyclonedx-py")
    options = ["--no-validate", "--output-reproducible", "--of", "JSON", "--pyproject", str(pyproject)]
    python = environment / "bin" / "python"
    subprocess.run([str(tool), "environment", *options, "--output-file", str(bill), str(python)], check=True)


def main(arguments: list[str]) -> None:
    """Finish the environment that the arguments name, and say how much was removed."""
    parser = argparse.ArgumentParser("finish.py", description=__doc__)
    parser.add_argument("environment", type=Path)
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("--whole", action="store_true", help="Remove nothing.")
    asked = parser.parse_args(arguments)
    write_bill(asked.environment, asked.pyproject)
    if not asked.whole:
        (site_packages,) = asked.environment.glob("lib/python3.*/site-packages")
        files, symbols = removed(site_packages), stripped(site_packages)
        sys.stdout.write(f"removed: {files / 1e6:.1f} MB of files, {symbols / 1e6:.1f} MB of symbols\n")


if __name__ == "__main__":
    main(sys.argv[1:])
