"""Packs the wheels that a machine without a network lacks into one archive, and checks its size.

    python -m bench.gpu_slot.wheels dist/gpu-wheels

The archive has what targets, drafts and coordinators need without TLS, in the versions that are installed here. It
leaves out packages that the machine has in a sufficient version, and always torch, triton and their dependencies. The
machine's packages come from pip's list (``--has``), or from the last slot's results, or else from ``EXPECTED``. The
limit of size holds for the archive and the checkout together.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

EARLIER = Path("bench/results/gpu-slot.json")
"""Results that the next slot continues from."""
DRY = Path("dist/gpu-slot-dry.json")
"""Results of a slot without a GPU."""


MOST_BYTES = 44 << 20
"""Bytes of the archive and the checkout together, at most: 64 MiB may be carried, and the rest is for what is built."""
ARCHIVE = "wheels.tar.xz"
_EXTRAS = ("engine",)
_LEFT_OUT = ("torch", "triton", "nvidia-", "cuda-", "cryptography")
_ENOUGH = {"transformers": SpecifierSet(">=5.17"), "tokenizers": SpecifierSet(">=0.23")}
"""Versions with which a slot's steps have run on a CPU; releases are not tested with them."""
EXPECTED = {
    "accelerate": "1.15.0",
    "huggingface-hub": "1.33.0",
    "numpy": "2.5.2",
    "safetensors": "0.8.0",
    "tokenizers": "0.23.2",
    "torch": "2.11.0",
    "transformers": "5.17.0",
    "triton": "3.6.0",
}
"""Packages of a machine before its first slot."""
_NEWEST_GLIBC = 39
"""Minor version of the newest glibc whose wheels the machine can load: 2.39."""


def wanted(has: Mapping[str, str], python_version: str = "3.12") -> dict[str, str]:
    """Versions of the distributions to carry, by name.

    Args:
        has: versions of the machine's distributions, by name.
        python_version: the machine's Python.
    """
    environment = {"python_version": python_version, "python_full_version": f"{python_version}.0"}
    chosen: dict[str, str] = {}
    pending = [("specdec", extra) for extra in ("", *_EXTRAS)]
    seen = set(pending)
    while pending:
        name, extra = pending.pop()
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
                continue
            needed = canonicalize_name(requirement.name)
            if needed == "specdec" or needed.startswith(_LEFT_OUT):
                continue
            enough = _ENOUGH.get(needed, requirement.specifier)
            if needed in has and enough.contains(has[needed], prereleases=True) and needed not in chosen:
                continue
            chosen[needed] = metadata.version(needed)
            for item in ((needed, own) for own in ("", *requirement.extras)):
                if item not in seen:
                    seen.add(item)
                    pending.append(item)
    return dict(sorted(chosen.items()))


def known(has: Path | None, earlier: Path) -> dict[str, str]:
    """Versions of the machine's distributions: from a list, else from the last slot's results, else ``EXPECTED``."""
    if has is not None:
        return installed(has)
    is_real = earlier.exists() and not json.loads(earlier.read_text()).get("machine", {"dry": True}).get("dry", False)
    return installed(earlier) if is_real else EXPECTED


def installed(path: Path) -> dict[str, str]:
    """Versions by name, from pip's list or a slot's results."""
    listed = json.loads(path.read_text())
    listed = listed["machine"]["found"]["distributions"] if isinstance(listed, dict) else listed
    return {canonicalize_name(item["name"]): item["version"] for item in listed}


def check_size(archive: Path, beside_bytes: int) -> int:
    """Bytes of an archive. Raises ``ValueError`` where it and ``beside_bytes`` exceed ``MOST_BYTES``."""
    size = archive.stat().st_size
    if size + beside_bytes > MOST_BYTES:
        raise ValueError(
            f"{size / 2**20:.1f} MiB of wheels beside a checkout of {beside_bytes / 2**20:.1f}, and "
            f"{MOST_BYTES / 2**20:.0f} may be carried: name what the machine has (--has)"
        )
    return size


def pack(folder: Path, archive: Path) -> None:
    """Pack the contents of a folder's wheels into one archive, which takes two thirds of their size."""
    with tarfile.open(archive, "w:xz") as together:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as content:
                for item in content.infolist():
                    entry = tarfile.TarInfo(item.filename)
                    entry.size = item.file_size
                    if not item.is_dir():
                        together.addfile(entry, content.open(item))


def checkout_bytes() -> int:
    """Bytes of the files of this checkout that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = set(subprocess.run(command, capture_output=True, check=True).stdout.split(b"\0"))
    return sum(os.path.getsize(path) for path in listed if path and os.path.exists(path))


def main() -> int:
    """Download and pack the wheels; the exit code is 1 where they are too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--has", type=Path, help="the machine's `pip list --format json`, or a slot's results")
    parser.add_argument("--python", default="3.12", help="the machine's version of Python")
    parser.add_argument("--list", action="store_true", help="print the versions, and download nothing")
    options = parser.parse_args()
    chosen = wanted(known(options.has, EARLIER), options.python)
    pins = [f"{name}=={version}" for name, version in chosen.items()]
    if options.list:
        print("\n".join(pins))
        return 0
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    tags = [f"--python-version={options.python}", "--implementation=cp"]
    tags += [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(_NEWEST_GLIBC, 4, -1)]
    tags += [f"--platform=manylinux{tag}_x86_64" for tag in ("2014", "2010", "1")]
    for old in options.folder.glob("*.whl"):
        old.unlink()  # they may have other versions
    subprocess.run([*command, *tags, "--dest", str(options.folder), *pins], check=True)
    archive = options.folder / ARCHIVE
    pack(options.folder, archive)
    beside_bytes = checkout_bytes()
    try:
        size = check_size(archive, beside_bytes)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    left = (MOST_BYTES - size - beside_bytes) / 2**20
    print(f"{len(pins)} wheels, {size / 2**20:.1f} MiB, in {archive}; {left:.1f} MiB are left beside the checkout")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
