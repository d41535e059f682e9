"""What each image and extra installs suffices for what is run there: other imports are blocked."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.main import get_command

from specdec.commands.app import app
from specdec.commands.up.service_process import MODULES
from tests.support.dockerfile import FINAL, environment, last, requirements_of_image
from tests.support.import_graph import PACKAGES, foreign_imports
from tests.support.installed import distributions_of, environment_without, modules_without
from tests.support.services.fake_coordinator import running_fake_coordinator
from tests.support.services.health import served_health

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("engine", "gateway", "s3", "shipped")
"""Those for users."""
KINDS = (*(f"image {stage}" for stage in FINAL), "no extra", *(f"extra {name}" for name in EXTRAS))
NEEDS = {"tune --help": "engine", "serve gateway --help": "gateway"}
"""Commands that cannot even tell of themselves without an extra."""
SERVING = 1
Told = tuple[int, str, str]
RUN_ALL = """
import contextlib, io, json, sys
from specdec.commands.main import main

results = {}
for line in json.loads(sys.argv[1]):
    output, errors, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["specdec", *line.split()]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    results[line] = (code, output.getvalue(), errors.getvalue())
json.dump(results, sys.stdout)
"""


def roles(stage: str) -> list[str]:
    """The services that an image may start."""
    _, _, *role = json.loads(last(stage, "ENTRYPOINT"))
    return role or ["target", "draft"]


@dataclass(frozen=True)
class Installed:
    """A Python with what an image or extra brings."""

    blocked: frozenset[str]
    """Modules."""
    variables: Mapping[str, str]

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        environment = {**self.variables, **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def tell(self, lines: list[str]) -> dict[str, Told]:
        """What `specdec` answers to each line: its exit code, output and errors."""
        done = self.run("-c", RUN_ALL, json.dumps(lines))
        assert done.returncode == 0, done.stderr
        return {line: (code, output, errors) for line, (code, output, errors) in json.loads(done.stdout).items()}


def plain_help(stage: str) -> dict[str, str]:
    """The image's variables that say how help is shown."""
    return {name: value for name, value in environment(stage).items() if name.startswith("TYPER_")}


def without(modules: Iterable[str], folder: Path) -> Installed:
    return Installed(frozenset(modules), environment_without(modules, folder, ROOT))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Installed]:
    @functools.cache
    def make(kind: str) -> Installed:
        folder = tmp_path_factory.mktemp("installed")
        of, _, name = kind.partition(" ")
        extras = name.split("+") if of == "extra" else []
        extra = [line for each in extras for line in PROJECT["optional-dependencies"][each]]
        if of != "image":
            return without(modules_without(distributions_of([*PROJECT["dependencies"], *extra])), folder)
        # A lock is installed without what it does not name.
        there = frozenset(Requirement(line).name for line in requirements_of_image(name))
        one = without(modules_without(there), folder)
        return Installed(one.blocked, {**one.variables, **plain_help(name)})

    return make


@pytest.fixture(scope="module")
def helps(made: Callable[[str], Installed]) -> Callable[[str], dict[str, Told]]:
    """What each command says of itself, by its line; equal environments are asked once."""
    lines = [
        *(f"{line} --help".strip() for line in lines_of(get_command(app))),
        *(f"serve {role} --help" for role in MODULES),
    ]
    known: dict[frozenset[str], dict[str, Told]] = {}

    def of(kind: str) -> dict[str, Told]:
        one = made(kind)
        if one.blocked not in known:
            known[one.blocked] = one.tell(lines)
        return known[one.blocked]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_each_command_tells_of_itself_or_names_the_extra_that_it_needs(
    kind: str, helps: Callable[[str], dict[str, Told]]
) -> None:
    has = {"engine-cpu": "engine", "engine-cuda": "engine"}.get(kind.split()[-1], kind.split()[-1])
    for line, (code, output, errors) in helps(kind).items():
        extra = NEEDS.get(line)
        if extra in (None, has):
            assert code == 0 and re.match(r"(?i)\s*usage: specdec", output), f"{line}: {errors}"
        else:
            assert code == 1
            assert re.fullmatch(rf"error: this needs \w+: pip install 'specdec\[{extra}\]'\n", errors), errors


@pytest.mark.parametrize("stage", FINAL)
def test_what_an_image_starts_runs_with_what_it_installs(stage: str, helps: Callable[[str], dict[str, Told]]) -> None:
    told = helps(f"image {stage}")
    for role in roles(stage):
        assert told[f"serve {role} --help"][0] == 0


def lines_of(command: Any, line: str = "") -> Iterator[str]:
    """What is typed for a command, then for each of its sub-commands."""
    yield line
    for name in list(getattr(command, "commands", ())):
        yield from lines_of(command.get_command(None, name), f"{line} {name}".strip())


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def healthy() -> Iterator[dict[str, str]]:
    """Addresses of a healthy service, by how it is asked."""
    with served_health(SERVING) as grpc_address, HTTPServer(("127.0.0.1", 0), _Healthy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield {"grpc": grpc_address, "http": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()


@pytest.mark.parametrize("stage", FINAL)
def test_an_image_has_what_its_probe_needs(
    stage: str, made: Callable[[str], Installed], healthy: dict[str, str]
) -> None:
    address = healthy["http" if stage == "gateway" else "grpc"]
    program, *arguments = json.loads(last(stage, "HEALTHCHECK").partition("CMD ")[2])
    assert program == "specdec"
    done = made(f"image {stage}").run("-m", "specdec.commands.main", *arguments, SPECDEC_HEALTH_ADDRESS=address)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{address.removeprefix('http://')}: SERVING\n", "")


@pytest.mark.parametrize(("protocol", "others"), [("grpc", set()), ("http", {"grpc", "asyncio"})])
def test_a_probe_imports_little(protocol: str, others: set[str], healthy: dict[str, str], tmp_path: Path) -> None:
    """It runs every few seconds for as long as a container lives."""
    costly = {"typer", "rich", "pydantic", "google", "grpc_health", "yaml", "structlog"} | others
    done = without(costly, tmp_path).run("-m", "specdec.commands.main", "health", "--address", healthy[protocol])
    assert (done.returncode, done.stderr) == (0, "")


def test_the_list_of_commands_imports_none_of_them(tmp_path: Path) -> None:
    costly = {"grpc", "rich", "google", "yaml", "structlog", "asyncio"}
    done = without(costly, tmp_path).run("-m", "specdec.commands.main", "--help")
    assert done.returncode == 0, done.stderr


def test_the_list_says_of_each_command_what_its_own_help_says_first() -> None:
    group = get_command(app)
    for name, listed in list(group.commands.items()):  # type: ignore[attr-defined]
        own = group.get_command(None, name)  # type: ignore[attr-defined]
        assert own.get_short_help_str(200) == listed.get_short_help_str(200)
        assert listed.help.startswith(listed.get_short_help_str(200))


def test_the_clients_example_runs_without_an_extra(made: Callable[[str], Installed]) -> None:
    page = (ROOT / "docs" / "python-client.md").read_text(encoding="utf-8")
    example, in_asyncio = re.findall(r"(?ms)^```python\n(.*?)^```", page)[:2]
    with running_fake_coordinator() as (_, address):
        done = made("no extra").run("-c", f"{example}\n{in_asyncio}".replace("127.0.0.1:50051", address))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout[: len(done.stdout) // 2], done.stdout[len(done.stdout) // 2 :]
    assert first == second != ""


def test_a_command_that_runs_a_model_says_first_and_in_a_line_that_it_needs_the_engine(
    made: Callable[[str], Installed], tmp_path: Path
) -> None:
    settings, prompts = tmp_path / "settings.yaml", tmp_path / "prompts.json"
    settings.write_text("up: {}\n")
    prompts.write_text('["x"]')
    lines = [
        "up --free-ports --no-gateway --target none/m --draft none/m",
        "demo",
        "tune --target none/m --draft none/m",
        f"train medusa --target none/m --prompts {prompts} --out {tmp_path / 'head'}",
        "audit --target none/m",
        f"doctor --settings {settings}",
    ]
    for line, (code, output, errors) in made("no extra").tell(lines).items():
        said = errors.removeprefix("doctor: starting\n")
        assert (code, output) == (1, ""), line
        assert re.fullmatch(r"error: this needs \w+: pip install 'specdec\[engine\]'\n", said), f"{line}: {errors}"


@pytest.mark.parametrize("stage", ["coordinator", "gateway"])
def test_an_image_without_the_hubs_client_says_in_a_line_that_it_downloads_nothing(
    stage: str, made: Callable[[str], Installed]
) -> None:
    ((code, output, errors),) = made(f"image {stage}").tell(["fetch org/name"]).values()
    assert (code, output) == (1, "")
    assert re.fullmatch(r"error: this needs huggingface_hub: pip install 'specdec\[engine\]'\n", errors), errors


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        *((f"image {stage}", f"{MODULES[role]}.__main__") for stage in FINAL for role in roles(stage)),
        ("no extra", "specdec.client"),
        ("extra engine+gateway+plan+s3", "specdec.commands.main"),
    ],
)
def test_all_that_a_start_leads_to_imports_only_what_is_installed(
    kind: str, start: str, made: Callable[[str], Installed]
) -> None:
    """Wherever the statement stands, and in the processes that it starts."""
    blocked = made(kind).blocked - {"triton"}  # torch for CUDA brings it
    reached = foreign_imports(ROOT, PACKAGES, start)
    assert {module: names & blocked for module, names in reached.items() if names & blocked} == {}


def test_processes_that_services_start_are_followed() -> None:
    assert {"specdec.replica.bridge.engine_child", "specdec.target_service.model_process"} <= set(
        foreign_imports(ROOT, PACKAGES, "specdec.target_service.__main__")
    )
    assert "specdec.coordinator.child_main" in foreign_imports(ROOT, PACKAGES, "specdec.coordinator.__main__")
