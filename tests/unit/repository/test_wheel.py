"""The wheel that setup.py builds: with kernels that need no compiler, or without, and then for every machine."""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specdec.engine.native.build import library_name
from specdec.engine.native.variants import variants_for
from tests.support.engine.kernel_variants import fast_compiler

ROOT = Path(__file__).parents[3]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "specdec", "coordinator", "draft_service")
SOURCES += ("gateway", "target_service", "proto")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def build(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BUILD, str(checkout.parent)],
        cwd=checkout,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_wheel_brings_all_kernels_of_its_machine_and_they_load_without_a_compiler(
    checkout: Path, tmp_path: Path
) -> None:
    done = build(checkout, CXX=fast_compiler(tmp_path))
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    machine = platform.machine()
    assert wheel.name.endswith(f"-py3-none-linux_{machine}.whl")
    libraries = {f"specdec/engine/native/lib/{library_name(variant)}" for variant in variants_for(machine)}
    page = {f"specdec/gateway/page/files/{path.name}" for path in (ROOT / "gateway/page/files").iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert libraries | page <= names
        assert {"specdec/coordinator/__main__.py", "specdec/target_service/verifier.py"} <= names
        assert {name.split("/")[0].partition("-")[0] for name in names} == {"specdec"}, "names of users' own modules"
        archive.extractall(tmp_path / "installed")
    script = "from specdec.engine.native.build import load_library; print(load_library()[0]._name)"
    loaded = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path / "installed",
        env={"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.strip() in {str(tmp_path / "installed" / library) for library in libraries}


def test_a_wheel_is_not_built_without_its_kernels_unless_that_is_asked_for(checkout: Path, tmp_path: Path) -> None:
    refused = build(checkout, PATH=str(tmp_path), CXX="")
    assert refused.returncode != 0
    assert "set SPECDEC_PURE_WHEEL=1 for a wheel without" in refused.stderr
    assert not list(tmp_path.glob("*.whl"))
    done = build(checkout, PATH=str(tmp_path), CXX="", SPECDEC_PURE_WHEEL="1")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
        assert "specdec/engine/native/kernels.cpp" in archive.namelist(), "compiled on first use"
