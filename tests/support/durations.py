"""Decides which tests are quick: `make test` runs these, and `make test-all` also the others.

A test is quick if it is marked `smoke`; or if it is not in one of NEVER_QUICK, and its function, with all cases, takes
at most QUICK_S of processor time by tests/durations.json. A test without a record is quick. Functions that take
_LEAST_RECORDED_S or more have records of their own; all others of a file share the record of the file.
`--store-durations` records the files of a run; run whole files. Processor time includes the worker's child processes,
and hardly depends on the machine's load.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests/durations.json"
QUICK_S = 0.8
"""Processor seconds of all cases of a quick test function, at most."""
QUICK_SUM_S = 385.0
"""Processor seconds of all quick tests, at most: 3.2 minutes on two cores, beside 1.8 for collection and waits."""
_LEAST_RECORDED_S = 0.3
NEVER_QUICK = (
    "adversary", "chaos", "chart", "clients", "defects", "e2e", "fuzz", "gpu", "integration", "security", "upgrade",
    "unit/cuda", "unit/engine/test_zoo.py", "unit/fake_cuda", "unit/gateway/test_page.py", "unit/repository",
)  # fmt: skip
"""Folders and files of tests/ that start services, wait, or need tools which only `make test-all` installs."""
_PROPERTY = "processor_s"


def function_of(item: str) -> str:
    """An item's id without the case."""
    return item.partition("[")[0]


def is_quick(item: pytest.Item, recorded: dict[str, float]) -> bool:
    """Whether a test is quick by `recorded`, which `read` returns."""
    if any(item.get_closest_marker(name) for name in ("long", "gpu")):
        return False
    if item.get_closest_marker("smoke"):
        return True
    if _is_never_quick(item.path):
        return False
    return recorded.get(function_of(item.nodeid), 0.0) <= QUICK_S


@functools.cache
def _is_never_quick(path: Path) -> bool:
    return any(ROOT / "tests" / name in (path, *path.parents) for name in NEVER_QUICK)


@functools.cache
def read() -> dict[str, float]:
    """Processor seconds by function, and by file for its other functions."""
    recorded: dict[str, float] = json.loads(FILE.read_text())
    return recorded


def updated(recorded: dict[str, float], measured: dict[str, float]) -> dict[str, float]:
    """The records after a run, in which items took `measured` seconds.

    Files of the run are recorded anew; files that do not exist any more are left out.
    """
    by_function: defaultdict[str, float] = defaultdict(float)
    for item, seconds in measured.items():
        by_function[function_of(item)] += seconds
    fresh: defaultdict[str, float] = defaultdict(float)
    for function, seconds in by_function.items():
        fresh[function if seconds >= _LEAST_RECORDED_S else function.partition("::")[0]] += seconds
    ran = {function.partition("::")[0] for function in by_function}
    kept = {
        name: s
        for name, s in recorded.items()
        if (file := name.partition("::")[0]) not in ran and (ROOT / file).is_file()
    }
    return {name: round(seconds, 2) for name, seconds in sorted({**kept, **fresh}.items())}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-durations", action="store_true", help="record in tests/durations.json what tests took")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--store-durations"):
        config.pluginmanager.register(_Recorder())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files without quick tests where these run, because importing all files takes half a minute."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return (is_test and config.option.markexpr == "quick" and has_no_quick(collection_path)) or None


def has_no_quick(file: Path) -> bool:
    """Whether no test of a file is quick."""
    return _is_never_quick(file) and "mark.smoke" not in file.read_text()


# Runs before -m selects.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    recorded = read()
    for item in items:
        if is_quick(item, recorded):
            item.add_marker(pytest.mark.quick)


class _Recorder:
    """Measures tests in the workers; the main process writes the file."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._measured: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._began_s = _processor_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            # Negative where a process with children was killed.
            report.user_properties.append((_PROPERTY, max(0.0, _processor_s() - self._began_s)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _PROPERTY:
                self._measured[report.nodeid] = value

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            FILE.write_text(json.dumps(updated(read(), self._measured), indent=0) + "\n")


def _processor_s() -> float:
    """Processor seconds of this process and its descendants, with the ended children that they have waited for."""
    total = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue  # Its parent's times include it now.
    return total
