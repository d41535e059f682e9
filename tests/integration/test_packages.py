"""The packages as people get them: built of this checkout, installed into an environment of their own, used elsewhere.

What specdec needs (torch and others) comes from the environment of these tests; specdec itself does not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import specdec
from tests.support.services.up_command import UpCommand

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PAIR_VERSION = tomllib.loads((ROOT / "models" / "pyproject.toml").read_text())["project"]["version"]
MADE = {".pyc", ".so"}
NATIVE_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "specdec" / "native"
REPRODUCIBLE = {"SPECDEC_PURE_WHEEL": "1", "SOURCE_DATE_EPOCH": "1700000000"}


@dataclass(frozen=True)
class Packages:
    """What `releases/packages.sh` left in a folder."""

    folder: Path

    @property
    def wheel(self) -> Path:
        return self.folder / f"specdec-{specdec.__version__}-py3-none-any.whl"

    @property
    def sdist(self) -> Path:
        return self.folder / f"specdec-{specdec.__version__}.tar.gz"

    @property
    def pair(self) -> Path:
        return self.folder / f"specdec_shipped_models-{PAIR_VERSION}-py3-none-any.whl"

    @property
    def plugin(self) -> Path:
        return next(self.folder.glob("specdec_vllm-*-py3-none-any.whl"))


@dataclass(frozen=True)
class Installation:
    """An environment, and a folder that has nothing to do with the checkout."""

    python: Path
    folder: Path

    def environment(self) -> Mapping[str, str]:
        own = {"HOME": str(self.folder), "SPECDEC_NATIVE_CACHE": str(NATIVE_CACHE), "PYTHONUNBUFFERED": "1"}
        own["SPECDEC_UP_PLACEMENT"] = "apart"  # measuring where the draft runs takes as long as all the rest
        return {**{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}, **own}

    def install(self, wheel: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "install",
            "--no-deps",
            "--no-index",
            wheel,
        ]
        subprocess.run(command, check=True, capture_output=True)

    def command(self, *arguments: str) -> Sequence[str]:
        return [str(self.python.with_name("specdec")), *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=250,
        )


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    folder = tmp_path_factory.mktemp("packages")
    environment = {**os.environ, **REPRODUCIBLE, "PYTHON": sys.executable}
    script = [ROOT / "releases" / "packages.sh", folder]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Packages(folder)


@pytest.fixture(scope="module")
def installation(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The wheel alone, without the pair."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=False)
    installed = Installation(folder / "venv" / "bin" / "python", folder)
    installed.install(packages.wheel)
    # A line of a .pth file adds a folder, and not what the .pth files of that folder add, such as this checkout.
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "what-it-needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return installed


@pytest.fixture(scope="module")
def with_pair(installation: Installation, packages: Packages) -> Installation:
    """The pair is installed, too."""
    installation.install(packages.pair)
    return installation


def test_the_wheel_has_every_file_of_the_packages_and_no_model(packages: Packages) -> None:
    services = {ROOT / "specdec" / name: name for name in ("coordinator", "draft_service", "gateway", "target_service")}
    assert all(link.is_symlink() for link in services), "rglob would not find what is behind it"
    folders = {ROOT / "specdec": "specdec", **{ROOT / name: f"specdec/{name}" for name in services.values()}}
    sources = {
        f"{inside}/{path.relative_to(folder)}"
        for folder, inside in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in MADE
    }
    sources |= {str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto")}
    with zipfile.ZipFile(packages.wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == sources


def test_the_sdist_has_what_its_wheel_is_built_of_and_no_model(packages: Packages) -> None:
    with tarfile.open(packages.sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "setup.py", "LICENSE", "README.md", "proto/specdec/v1/common.proto"} <= found
    assert not [name for name in found if name.startswith("models") or name.endswith(".safetensors")]


def test_the_package_of_the_pair_has_its_files_and_none_of_the_scripts_beside_them(packages: Packages) -> None:
    with zipfile.ZipFile(packages.pair) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    folders = [ROOT / "models" / name for name in ("target", "draft", "eagle3")]
    data = [
        *(path for folder in folders for path in folder.iterdir() if path.suffix != ".xz"),
        ROOT / "models/prompts.json",
    ]
    assert found == {f"specdec_shipped_models/{path.relative_to(ROOT / 'models')}" for path in data}


def test_the_plugin_for_vllm_is_a_package_of_its_own_and_loads_no_torch(
    packages: Packages, installation: Installation
) -> None:
    with zipfile.ZipFile(packages.plugin) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = (ROOT / "vllm_plugin").rglob("*.py")
    assert found == {str(path.relative_to(ROOT / "vllm_plugin")) for path in sources}
    installation.install(packages.plugin)
    told = subprocess.run(
        [installation.python, "-c", "import specdec_vllm, sys; print(specdec_vllm.__file__, 'torch' in sys.modules)"],
        cwd=installation.folder,
        env=installation.environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told.startswith(str(installation.folder))
    assert told.split()[-1] == "False"


def test_the_sdist_gives_the_same_wheel_to_the_byte_wherever_it_is_built(packages: Packages, tmp_path: Path) -> None:
    with tarfile.open(packages.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    subprocess.run(
        [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_wheel('..')"],
        cwd=tmp_path / packages.sdist.name.removesuffix(".tar.gz"),
        env={**os.environ, **REPRODUCIBLE},
        capture_output=True,
        check=True,
    )
    assert (tmp_path / packages.wheel.name).read_bytes() == packages.wheel.read_bytes()


def test_the_environment_of_the_tests_has_what_the_wheel_asks_for(packages: Packages) -> None:
    """So that what is found below is what `pip install 'specdec[engine]'` gives."""
    with zipfile.ZipFile(packages.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        asked = metadata.PathDistribution(zipfile.Path(packages.wheel, name.removesuffix("METADATA"))).requires or []
    needed = [
        requirement
        for requirement in map(Requirement, asked)
        if requirement.marker is None or requirement.marker.evaluate({"extra": "engine"})
    ]
    assert {"torch", "grpcio"} <= {requirement.name for requirement in needed}
    assert [str(r) for r in needed if not r.specifier.contains(metadata.version(r.name), prereleases=True)] == []


def test_the_command_runs_outside_the_checkout(installation: Installation) -> None:
    done = installation.run("--help")
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
    where = [str(installation.python), "-c", "import specdec; print(specdec.__file__)"]
    found = subprocess.run(
        where, cwd=installation.folder, env=installation.environment(), capture_output=True, text=True
    )
    assert found.stdout.startswith(str(installation.folder))


def test_without_a_model_one_line_says_what_to_do(installation: Installation) -> None:
    done = installation.run("up", "--free-ports", "--device", "cpu")
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert said == (
        "error: there is no model: name one with --target (a folder or hub id), or pip install specdec-shipped-models"
    )


def test_with_the_pair_it_starts_and_completes_code(with_pair: Installation) -> None:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            with_pair.command("up", "--free-ports", "--device", "cpu"),
            cwd=with_pair.folder,
            env=with_pair.environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, inherited)
    up = UpCommand(process)
    try:
        done = with_pair.run(
            "generate", "--address", up.address, "--max-tokens", "24", "--temperature", "0", "def f(n):\n"
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        process.send_signal(signal.SIGINT)
        assert up.wait_end() == 130
    finally:
        process.kill()
        up.wait_end()
