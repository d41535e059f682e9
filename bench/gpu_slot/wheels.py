"""Which wheels a slot must carry for a machine without a network, in one archive, and whether that is small enough.

    python -m bench.gpu_slot.wheels dist/gpu-wheels

Wanted is all that targets, drafts and coordinators need without TLS, in the versions that are installed here; not what
the machine has in a version that will do, and never torch, triton and what they bring, which it has. What a machine has
pip lists (``--has``), or the last slot's results say; before the first one it is ``EXPECTED``. The archive and the
checkout travel together.
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
"""What the next slot goes on from."""
DRY = Path("dist/gpu-slot-dry.json")
"""Of a slot without a GPU, which leaves nothing done."""


MOST_BYTES = 64 << 20
"""Of the archive and the checkout."""
ARCHIVE = "wheels.tar.xz"
_EXTRAS = ("engine",)
_LEFT_OUT = ("torch", "triton", "nvidia-", "cuda-", "cryptography")
_ENOUGH = {"transformers": SpecifierSet(">=5.17"), "tokenizers": SpecifierSet(">=0.23")}
"""What a slot on one GPU does ran with these as well, on a CPU; a release is not tested with them."""
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
"""Of a machine that no slot has been on."""
_NEWEST_GLIBC = 39
"""Of wheels that the machine can load: 2.39."""


def wanted(has: Mapping[str, str], python_version: str = "3.12") -> dict[str, str]:
    """Distributions to carry with their versions, by name.

    Args:
        has: versions by name of what the machine has.
        python_version: the machine's.
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
    """Versions by name of what the machine has: by a list, else by the last slot's results, else as expected."""
    if has is not None:
        return installed(has)
    is_real = earlier.exists() and not json.loads(earlier.read_text()).get("machine", {"dry": True}).get("dry", False)
    return installed(earlier) if is_real else EXPECTED


def installed(path: Path) -> dict[str, str]:
    """Versions by name, of pip's list or of a slot's results."""
    listed = json.loads(path.read_text())
    listed = listed["machine"]["found"]["distributions"] if isinstance(listed, dict) else listed
    return {canonicalize_name(item["name"]): item["version"] for item in listed}


def check_size(archive: Path, beside_bytes: int) -> int:
    """Bytes of an archive. Raises ``ValueError`` where it and what travels beside it are more than may be carried."""
    size = archive.stat().st_size
    if size + beside_bytes > MOST_BYTES:
        raise ValueError(
            f"{size / 2**20:.1f} MiB of wheels beside a checkout of {beside_bytes / 2**20:.1f}, and "
            f"{MOST_BYTES / 2**20:.0f} may be carried: say what the machine has (--has)"
        )
    return size


def pack(folder: Path, archive: Path) -> None:
    """Put what a folder's wheels unpack to into one archive: two thirds of their size, as all are compressed as one."""
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
    """Download and pack what is wanted; the exit code is 1 where it is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--has", type=Path, help="the machine's `pip list --format json`, or results of a slot")
    parser.add_argument("--python", default="3.12", help="its version of Python")
    parser.add_argument("--list", action="store_true", help="say what is wanted, and download nothing")
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
        old.unlink()  # of other versions, perhaps
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
