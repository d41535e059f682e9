"""The rules about who may import whom (docs/architecture.md)."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.for_each import for_each
from tests.support.import_graph import PACKAGES, SERVICES, Graph, circle, grouped, import_graph
from tests.unit.repository.floors import FLOORS

ROOT = Path(__file__).resolve().parents[3]
TENSORS = ("torch", "transformers", "safetensors")
MOST_FILES = 16
"""Of one folder, the face (`__init__.py`) included."""
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}


def modules_of(package: str) -> Iterator[Path]:
    for path in sorted((ROOT / package).rglob("*.py")):
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            yield path


@functools.cache
def imports_of(path: Path) -> Sequence[str]:
    """The absolute names of all that a module imports, wherever the statement stands."""
    package, names = path.relative_to(ROOT).with_suffix("").parts[:-1], list[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return names


def offences(package: str, *forbidden: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules_of(package)
        for name in imports_of(path)
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in forbidden)
    ]


def loaded_by(modules: Sequence[str], libraries: Sequence[str]) -> dict[str, str]:
    """Those of the libraries that are loaded after each module, imported one after the other in a process."""
    program = f"""
import importlib, sys
for name in {list(modules)}:
    importlib.import_module(name)
    if found := sorted({set(libraries)!r} & set(sys.modules)):
        print(name, *found)
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return dict(line.split(" ", 1) for line in run.stdout.splitlines())


@pytest.mark.smoke
@pytest.mark.parametrize("service", SERVICES)
def test_services_never_import_each_other(service: str) -> None:
    assert offences(service, *(f"specdec.{other}" for other in SERVICES if other != service)) == []


@pytest.mark.smoke
def test_the_shared_package_never_imports_a_service() -> None:
    """But for `specdec.plan`, which runs the services' own policies in simulated time, and which nobody imports."""
    found = offences("specdec", *(f"specdec.{service}" for service in SERVICES))
    assert [each for each in found if not each.startswith("specdec/plan/")] == []


@pytest.mark.smoke
def test_the_coordinator_never_names_tensors_or_the_engine() -> None:
    assert offences("coordinator", *TENSORS, "specdec.engine") == []


@pytest.mark.smoke
def test_the_gateway_never_names_tensors_a_tokenizer_or_the_engine() -> None:
    assert offences("gateway", *TENSORS, "tokenizers", "specdec.engine") == []


@pytest.mark.smoke
def test_rpc_never_imports_the_engine() -> None:
    assert offences("specdec/service", *TENSORS, "specdec.engine") == []


def test_bookkeeping_clients_and_processes_beside_an_engine_load_no_tensors() -> None:
    """Only the engine process does: the others start fast and stay small. Exporters are loaded where tracing is on."""
    modules = [f"specdec.engine.{name}" for name in ("sequence", "block_pool", "scheduler", "tree")]
    modules += [f"specdec.{name}" for name in ("wire.sampling_params", "config", "client", "commands.app")]
    modules += [f"specdec.{service}.__main__" for service in SERVICES]
    assert loaded_by(modules, (*TENSORS, "opentelemetry.exporter")) == {}


def test_a_draft_without_a_model_and_a_target_behind_an_endpoint_need_nothing_that_models_need() -> None:
    modules = ["specdec.draft_service.modelless.process", "specdec.target_service.api.process"]
    assert loaded_by(modules, (*TENSORS, "numpy", "llguidance", "accelerate")) == {}


def test_engine_processes_load_no_exporter() -> None:
    """Its thread would slow every step; the servicer exports for them."""
    modules = ["specdec.target_service.model_process", "specdec.draft_service.model_process"]
    assert loaded_by(modules, ("opentelemetry.exporter", "grpc")) == {}


@pytest.mark.smoke
def test_the_engine_knows_neither_role() -> None:
    assert offences("specdec/engine", *(f"specdec.{service}" for service in SERVICES), "grpc", "asyncio") == []


@pytest.mark.smoke
def test_no_module_is_named_after_nothing() -> None:
    modules = [path for package in ("specdec", "vllm_plugin", *SERVICES) for path in modules_of(package)]
    assert [str(path) for path in modules if path.stem in FORBIDDEN_NAMES] == []


@pytest.mark.smoke
def test_services_are_imported_by_the_name_that_the_wheel_gives_them() -> None:
    """In a checkout their folders could be imported beside `specdec`, as second modules that nobody else sees."""
    folders = ("specdec", *SERVICES, "bench", "tests", "vllm_plugin")
    assert {found for folder in folders for found in offences(folder, *SERVICES)} == set()


def test_no_test_file_or_conftest_is_imported() -> None:
    """What several of them use stands in tests/support, or beside them in a module that holds no tests."""
    imported = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in ("tests", "bench", "specdec", "vllm_plugin", *SERVICES)
        for path in modules_of(folder)
        for name in imports_of(path)
        if (parts := name.split("."))[0] == "tests"
        and any(part == "conftest" or part.startswith("test_") for part in parts)
    ]
    assert imported == []


@functools.cache
def graph_of_all() -> Graph:
    return import_graph(ROOT, PACKAGES)


@pytest.mark.smoke
def test_modules_import_each_other_in_no_circle() -> None:
    assert circle(graph_of_all()) == []


@pytest.mark.smoke
@for_each("package", FLOORS)
def test_imports_go_down_only(package: str) -> None:
    floors = [line.split() for line in FLOORS[package].strip().splitlines()]
    floor_of = {f"{package}.{name}": number for number, names in enumerate(floors) for name in names}
    inside = {name: imported for name, imported in graph_of_all().items() if f"{name}.".startswith(f"{package}.")}
    graph = grouped(inside, depth=package.count(".") + 2)
    unplaced = sorted(graph.keys() - floor_of.keys() - {package})
    assert unplaced == [], "every file and folder has a floor: see floors.py"
    upwards = [
        f"{name} imports {other}"
        for name, imported in graph.items()
        for other in imported & floor_of.keys()
        if name in floor_of and floor_of[other] >= floor_of[name]
    ]
    assert upwards == []


@pytest.mark.smoke
def test_no_folder_is_a_crowd() -> None:
    folders = {path.parent for package in PACKAGES for path in modules_of(package)}
    sizes = {
        str(folder.relative_to(ROOT)): len([p for p in folder.glob("*.py") if "_pb2" not in p.name])
        for folder in folders
    }
    assert {folder: size for folder, size in sizes.items() if size > MOST_FILES} == {}
