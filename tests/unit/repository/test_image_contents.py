"""What images hold: what locks name, as far as deploy/finish.py leaves it, and how much that is."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path, PurePath
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.dockerfile import (
    FINAL,
    LOCKS,
    STAGES,
    arguments,
    copied_stages,
    environment,
    locked,
    requirements_of_image,
)

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SMALL = ("coordinator", "gateway")
ENGINES = tuple(stage for stage in FINAL if stage not in SMALL)
LOCK_OF = {"coordinator": [], "gateway": ["gateway"], "engine": ["engine", "s3"]}
"""Extras of each lock."""
LEFT_OUT = {"tokenizers": {"huggingface-hub"}, "rich": {"markdown-it-py", "pygments"}}
"""What packages of the small images ask for, and use only for what no command does there."""
MOST_MB = {"coordinator": 69, "gateway": 88}
"""Of the locked packages, in the form that this test counts: without bytecode, before strip."""


@pytest.mark.parametrize("lock", LOCK_OF)
def test_locks_hold_what_pyproject_asks_for(lock: str) -> None:
    extras = [line for extra in LOCK_OF[lock] for line in PROJECT["optional-dependencies"][extra]]
    versions = {each.name: each.specifier for each in map(Requirement, locked(LOCKS / f"{lock}.txt"))}
    for need in map(Requirement, [*PROJECT["dependencies"], *extras]):
        if need.name != "torch":
            (version,) = versions[need.name.lower()]
            assert version.operator == "==" and need.specifier.contains(version.version), f"{need}: run make locks"


@pytest.mark.parametrize("stage", ENGINES)
def test_torch_is_asked_for_by_a_version_in_the_range_of_pyproject(stage: str) -> None:
    (built, _) = copied_stages(stage)
    [of_extra] = [need for need in map(Requirement, PROJECT["optional-dependencies"]["engine"]) if need.name == "torch"]
    asked = [Requirement(value) for value in arguments(built).values() if value.startswith("torch")]
    for (version,) in (need.specifier for need in asked):
        assert version.operator == "==" and of_extra.specifier.contains(version.version)
    assert any(line.startswith("torch==") for line in requirements_of_image(stage))


@pytest.mark.parametrize(
    ("stage", "cuda", "said"),
    [
        ("engine-cpu", None, ""),
        ("engine-cpu", "13.0", "not a CPU build of torch: set TORCH_CPU_PIP_ARGS\n"),
        ("engine-cuda", "13.0", ""),
        ("engine-cuda", None, "not a CUDA build of torch: set TORCH_CUDA_PIP_ARGS\n"),
    ],
)
def test_a_build_with_the_wrong_torch_says_so_without_the_libraries_that_it_lacks(
    stage: str, cuda: str | None, said: str, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcublas')")
    (tmp_path / "torch" / "version.py").write_text(f"cuda = {cuda!r}")
    (built, _) = copied_stages(stage)
    (install,) = [rest for keyword, rest in STAGES[built] if keyword == "RUN" and "${TORCH_" in rest]
    check = install.partition("&& /opt/specdec/bin/python ")[2]
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} {check}"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1 if said else 0, said)


@pytest.mark.parametrize("lock", LOCK_OF)
def test_what_images_install_is_pinned_by_hashes_and_is_all_they_need(lock: str) -> None:
    stages = [lock] if lock in SMALL else list(ENGINES)
    for stage in stages:
        installs = [rest for keyword, rest in STAGES[f"build-{stage}"] if keyword == "RUN" and f"locks/{lock}" in rest]
        assert len(installs) == 1 and {"--require-hashes", "--no-deps"} <= set(installs[0].split())
    hashes_of = locked(LOCKS / f"{lock}.txt")
    assert all(each.startswith("sha256:") for hashes in hashes_of.values() for each in hashes)
    assert all(hashes for hashes in hashes_of.values())
    names = {Requirement(line).name for line in hashes_of}
    left_out = LEFT_OUT if lock in SMALL else {}
    assert not names & {name for each in left_out.values() for name in each}
    for name in names | ({"torch"} if lock == "engine" else set()):
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another Python or system
        for need in map(Requirement, needs):
            is_needed = need.marker is None or need.marker.evaluate({"extra": ""})
            is_there = canonicalize_name(need.name) in names | {"torch"}
            assert not is_needed or need.name in left_out.get(name, ()) or is_there, (
                f"{name} needs {need}: run make locks"
            )


@pytest.fixture(scope="module")
def finish() -> ModuleType:
    spec = importlib.util.spec_from_file_location("finish", ROOT / "deploy" / "finish.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "path",
    [
        "torch/include/ATen/ATen.h",
        "torch/bin/protoc",
        "torch/test/cpp/api/test_api",
        "torch/share/cmake/Torch/TorchConfig.cmake",
        "uvloop/loop.pyx",
        "google/rpc/status.proto",
        "grpc/__init__.pyi",
        "sympy/core/tests/test_args.py",
        "numpy/tests/__pycache__/test_lazyloading.cpython-311.pyc",
    ],
)
def test_tests_types_sources_and_tools_are_needless(path: str, finish: ModuleType) -> None:
    assert finish.is_needless(PurePath(path))


@pytest.mark.parametrize(
    "path",
    [
        "torch/bin/torch_shm_manager",
        "torch/testing/__init__.py",
        "torch/lib/libtorch_cpu.so",
        "torch/__init__.py",
        "torch.py",
        "grpc/_cython/_credentials/roots.pem",
        "google/rpc/status_pb2.py",
        "tests.py",
        "transformers/models/llama/modeling_llama.py",
        "cryptography-50.0.2.dist-info/licenses/LICENSE",
        "typer/py.typed",
    ],
)
def test_what_is_imported_read_or_asked_for_by_licences_stays(path: str, finish: ModuleType) -> None:
    assert not finish.is_needless(PurePath(path))


def test_an_environment_is_smaller_afterwards_and_its_libraries_still_load(finish: ModuleType, tmp_path: Path) -> None:
    site_packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (library,) = Path(metadata.distribution("httptools").locate_file("httptools/parser")).glob("url_parser*.so")
    for name in (
        "fast/module.so",
        "fast.libs/libother.so.1",
        "fast/tests/deep/test_one.py",
        "fast/module.c",
        "fast/note.sockets",
    ):
        (site_packages / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, site_packages / name)
    size = library.stat().st_size

    assert finish.removed(site_packages) == 2 * size
    assert finish.stripped(site_packages) > size / 4
    left = {
        str(path.relative_to(site_packages)): path.stat().st_size
        for path in site_packages.rglob("*.*")
        if path.is_file()
    }
    module = left.pop("fast/module.so")
    assert left == {"fast.libs/libother.so.1": size, "fast/note.sockets": size}
    assert module < 0.75 * size
    assert not (site_packages / "fast" / "tests").exists()
    ctypes.PyDLL(str(site_packages / "fast" / "module.so"))


def test_the_bill_is_written_by_the_tool_beside_the_builds_python(finish: ModuleType, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    finish.write_bill(tmp_path, ROOT / "pyproject.toml")
    bill = json.loads((tmp_path / "share" / "specdec" / "sbom.cdx.json").read_text(encoding="utf-8"))
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "specdec"
    listed = {part["name"]: part["version"] for part in bill["components"]}
    assert listed["grpcio"] == metadata.version("grpcio")


@pytest.mark.parametrize("stage", FINAL)
def test_each_image_is_finished_after_its_packages_are_installed(stage: str) -> None:
    built, _ = copied_stages(stage)
    *_, install, finished = [rest for keyword, rest in STAGES[built] if keyword == "RUN"]
    assert "python install" in install
    command, *arguments = finished.split()
    assert (Path(command).name, Path(arguments[0]).name) == ("python", "finish.py")
    # What compiles at run time reads headers.
    assert ("--whole" in arguments) == (stage == "engine-cuda")


def test_the_bills_tool_is_the_one_of_releases() -> None:
    (line,) = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "cyclonedx-bom==" in line]
    pinned = line.partition('"')[2].partition('"')[0]
    runs = " ".join(rest for keyword, rest in STAGES["environment"] if keyword == "RUN")
    assert f"install --no-cache-dir {pinned} " in runs


def installed_mb(lines: Iterable[str], finish: ModuleType) -> dict[str, float]:
    """Megabytes of each requirement's files that an image keeps, as far as it is installed here."""
    sizes = {}
    for requirement in map(Requirement, lines):
        try:
            files = metadata.files(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue  # for another Python or system
        kept = [
            file for file in files if file.suffix != ".pyc" and ".." not in file.parts and not finish.is_needless(file)
        ]
        sizes[requirement.name] = (
            sum(path.stat().st_size for file in kept if (path := Path(file.locate())).exists()) / 1e6
        )
    return sizes


@pytest.mark.parametrize("stage", MOST_MB)
def test_what_a_small_image_installs_stays_small(stage: str, finish: ModuleType) -> None:
    """A new dependency, or one that has grown, is seen here and not after a build."""
    sizes = installed_mb(locked(LOCKS / f"{stage}.txt"), finish)
    assert {"grpcio", "cryptography", "pydantic-core"} <= sizes.keys()
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:8]
    assert 0.6 * MOST_MB[stage] < sum(sizes.values()) <= MOST_MB[stage], largest


@pytest.mark.parametrize("stage", MOST_MB)
def test_images_without_pygments_show_plain_help(stage: str) -> None:
    names = {Requirement(line).name for line in locked(LOCKS / f"{stage}.txt")}
    assert not names & {"pygments", "markdown-it-py", "mdurl"}
    assert environment(stage)["TYPER_USE_RICH"] == "false"


def test_an_image_of_each_name_is_printed_with_its_digest(tmp_path: Path) -> None:
    builder = tmp_path / "builder"
    builder.write_text(
        '#!/bin/sh\nwhile [ "$1" != --iidfile ]; do [ "$1" = --target ] && target=$2; shift; done\n'
        'echo "sha256:$target" > "$2"\n'
    )
    builder.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "deploy" / "build.sh", "coordinator", "gateway"],
        env={"PATH": "/usr/bin:/bin", "BUILDER": str(builder), "TAG": "t"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "specdec-coordinator:t sha256:coordinator",
        "specdec-gateway:t sha256:gateway",
    ]
