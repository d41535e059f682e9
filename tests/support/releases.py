"""The last release in releases/, where `make release-baseline` records it, and builds of revisions."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import specdec

ROOT = Path(__file__).parents[2]
RELEASES = ROOT / "releases"
_STARTER = "specdec/service/process.py"
"""Path of the services' starter; revisions without this file get a copy of it."""


@dataclass(frozen=True, slots=True)
class Build:
    """A version of the services that can run as processes."""

    version: str
    folder: Path
    """Folder with its packages."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables with which `python -m` runs this version, whatever is installed; none: the installed checkout."""
        return {} if self.folder == ROOT else {"PYTHONPATH": str(self.folder), "PYTHONSAFEPATH": "1"}

    def __str__(self) -> str:
        return self.version


@dataclass(frozen=True, slots=True)
class Baseline:
    """The record of a release."""

    folder: Path
    version: str
    sha256: Mapping[str, str] = field(repr=False)
    """SHA-256 of its files and of its section in CHANGELOG.md, at the time of recording."""

    @property
    def wheel(self) -> Path:
        """The wheel, without kernels, which are compiled on first use."""
        return self.folder / f"specdec-{self.version}-py3-none-any.whl"

    @property
    def protos(self) -> Path:
        """The protos, as an encoded FileDescriptorSet."""
        return self.folder / "protos.binpb"

    @property
    def chart(self) -> Path:
        """The chart, without dashboards and rules."""
        return self.folder / "chart"

    def digest_of(self, name: str) -> str:
        """Present SHA-256 of one of its files."""
        return hashlib.sha256((self.folder / name).read_bytes()).hexdigest()


def last_release() -> Baseline:
    """The one recorded release."""
    (folder,) = (path.parent for path in RELEASES.glob("*/record.json"))
    record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    return Baseline(folder, record["version"], record["sha256"])


def install(baseline: Baseline, folder: Path) -> Build:
    """Install a release into a folder of its own. It runs with this environment's dependencies."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", folder]
    environment = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*command, baseline.wheel], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    have_services_in_specdec(folder)
    return Build(baseline.version, folder)


def have_services_in_specdec(folder: Path) -> None:
    """Link services that a version has beside its package, so that `python -m specdec.target_service` runs."""
    for service in ("coordinator", "draft_service", "gateway", "target_service"):
        inside = folder / "specdec" / service
        if (folder / service).is_dir() and not inside.exists():
            inside.symlink_to(Path("..", service))


def this_version() -> Build:
    """The version of this checkout."""
    return Build(specdec.__version__, ROOT)


def checked_out(revision: str, folder: Path) -> Build:
    """Extract a revision of this repository into a folder. It runs with this environment's dependencies."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=False)
    assert archive.returncode == 0, archive.stderr.decode()
    subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
    have_services_in_specdec(folder)
    if not (folder / _STARTER).exists():
        (folder / _STARTER).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / _STARTER, folder / _STARTER)
    (version,) = re.findall(r'(?m)^__version__ = "(.*)"$', (folder / "specdec/__init__.py").read_text(encoding="utf-8"))
    return Build(version, folder)
