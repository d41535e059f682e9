"""What each image and extra installs suffices for what is run there: other imports are blocked."""

from __future__ import annotations

import ast
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

import pytest
from typer.main import get_command

from specdec.commands.app import app
from specdec.commands.up.service_process import MODULES
from tests.support.dockerfile import FINAL, last, requirements_of_image
from tests.support.installed import distributions_of, environment_without, modules_without
from tests.support.services.fake_coordinator import running_fake_coordinator
from tests.support.services.health import served_health

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("engine", "gateway", "shipped")
"""Those for users."""
KINDS = (*(f"image {stage}" for stage in FINAL), "no extra", *(f"extra {name}" for name in EXTRAS))
NEEDS = {"tune --help": "engine", "serve gateway --help": "gateway"}
"""Commands that cannot even tell of themselves without an extra."""
FOLDERS = {
    "no extra": "coordinator specdec/client specdec/config specdec/service specdec/store specdec/telemetry "
    "specdec/wire",
    "extra gateway": "gateway",
    "extra engine": "draft_service target_service specdec/commands specdec/constraints specdec/drafting specdec/engine "
    "specdec/replica",
}
"""Where what each of them brings has to do."""
SERVING = 1
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


def without(modules: Iterable[str], folder: Path) -> Installed:
    return Installed(frozenset(modules), environment_without(modules, folder, ROOT))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Installed]:
    def make(kind: str) -> Installed:
        folder = tmp_path_factory.mktemp("installed")
        of, _, name = kind.partition(" ")
        extra = PROJECT["optional-dependencies"].get(name, []) if of == "extra" else []
        wanted = requirements_of_image(name, folder) if of == "image" else [*PROJECT["dependencies"], *extra]
        return without(modules_without(distributions_of(wanted)), folder)

    return make


@pytest.fixture(scope="module")
def helps(made: Callable[[str], Installed]) -> Callable[[str], dict[str, tuple[int, str, str]]]:
    """What each command says of itself, by its line; equal environments are asked once."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    lines = ["--help", *(f"{name} --help" for name in commands), *(f"serve {role} --help" for role in MODULES)]
    known: dict[frozenset[str], dict[str, tuple[int, str, str]]] = {}

    def of(kind: str) -> dict[str, tuple[int, str, str]]:
        one = made(kind)
        if one.blocked not in known:
            done = one.run("-c", RUN_ALL, json.dumps(lines))
            assert done.returncode == 0, done.stderr
            known[one.blocked] = json.loads(done.stdout)
        return known[one.blocked]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_each_command_tells_of_itself_or_names_the_extra_that_it_needs(
    kind: str, helps: Callable[[str], dict[str, tuple[int, str, str]]]
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
def test_what_an_image_starts_runs_with_what_it_installs(
    stage: str, helps: Callable[[str], dict[str, tuple[int, str, str]]]
) -> None:
    _, *words = json.loads(last(stage, "ENTRYPOINT"))
    told = helps(f"image {stage}")
    for role in words[1:] or ("target", "draft"):
        assert told[f"serve {role} --help"][0] == 0


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


@pytest.mark.parametrize("arguments", ["up --free-ports --no-gateway --target m --draft m", "doctor --settings"])
def test_a_command_that_wants_to_run_a_model_without_an_engine_says_so_in_a_line(
    arguments: str, made: Callable[[str], Installed], tmp_path: Path
) -> None:
    (tmp_path / "settings.yaml").write_text("up: {}\n")
    words = arguments.split() + ([str(tmp_path / "settings.yaml")] if arguments.endswith("--settings") else [])
    done = made("no extra").run("-m", "specdec.commands.main", *words)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: this needs torch: pip install 'specdec[engine]'"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_import_wherever_it_stands_is_of_something_that_the_extra_brings(
    kind: str, made: Callable[[str], Installed]
) -> None:
    blocked = made(kind).blocked - {"triton"}  # torch for CUDA brings it
    sources = [path for folder in FOLDERS[kind].split() for path in (ROOT / folder).rglob("*.py")]
    found = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources
        for module in imported(path)
        if module in blocked
    }
    assert found == set()


def imported(path: Path) -> Iterator[str]:
    """Top-level names."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
