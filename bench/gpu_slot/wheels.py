"""Which wheels a slot must carry for a machine without a network, and whether they are small enough.

    python -m bench.gpu_slot.wheels dist/gpu-wheels --has pip-list.json

Wanted is all that targets, drafts, coordinators and the gateway need, in the versions that are installed here; not what
the machine has in a version that is allowed, and never torch, triton and what they bring, which it has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MOST_BYTES = 64 << 20
_EXTRAS = ("engine", "gateway")
_OF_THE_MACHINE = ("torch", "triton", "nvidia-", "cuda-")


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
            if needed == "specdec" or needed.startswith(_OF_THE_MACHINE):
                continue
            if needed in has and requirement.specifier.contains(has[needed], prereleases=True) and needed not in chosen:
                continue
            chosen[needed] = metadata.version(needed)
            for item in ((needed, own) for own in ("", *requirement.extras)):
                if item not in seen:
                    seen.add(item)
                    pending.append(item)
    return dict(sorted(chosen.items()))


def check_size(folder: Path) -> int:
    """Bytes of all wheels of a folder. Raises ``ValueError`` where they are more than may be carried."""
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.whl")}
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
        told = ", ".join(f"{name} {sizes[name] / 2**20:.1f}" for name in largest)
        raise ValueError(f"{total / 2**20:.1f} MiB of wheels, and {MOST_BYTES / 2**20:.0f} may be carried; {told}")
    return total


def main() -> int:
    """Download what is wanted; the exit code is 1 where it is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--has", type=Path, help="the machine's `pip list --format json`")
    parser.add_argument("--python", default="3.12", help="its version of Python")
    parser.add_argument("--list", action="store_true", help="say what is wanted, and download nothing")
    options = parser.parse_args()
    listed = json.loads(options.has.read_text()) if options.has else []
    chosen = wanted({canonicalize_name(item["name"]): item["version"] for item in listed}, options.python)
    pins = [f"{name}=={version}" for name, version in chosen.items()]
    if options.list:
        print("\n".join(pins))
        return 0
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    tags = [f"--python-version={options.python}", "--implementation=cp"]
    tags += [f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "_2_17", "2014", "_2_5")]
    subprocess.run([*command, *tags, "--dest", str(options.folder), *pins], check=True)
    try:
        total = check_size(options.folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(pins)} wheels, {total / 2**20:.1f} MiB, in {options.folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
