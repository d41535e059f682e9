"""Lets templates start the services and engines of this pytest process's tests.

With `--cold-starts` each is executed and imports everything itself, as users' services do.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdec.commands.up import service_process
from specdec.replica.bridge import engine_launch
from tests.support.fork_server.popen import Forking, Template
from tests.support.fork_server.template import COMMAND, ENGINE, PROBE, REPLICAS

_KINDS = {
    "specdec.coordinator": "service",
    "specdec.gateway": "gateway",
    **dict.fromkeys((*REPLICAS, ENGINE, COMMAND, PROBE), "engine"),
}
"""Kind of the template for each module; other modules are executed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cold-starts", action="store_true", help="execute services and engines instead of forking them")


@pytest.fixture(scope="session", autouse=True)
def warm_starts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start templates when they are first needed; they end with this process."""
    if request.config.getoption("--cold-starts"):
        yield
        return
    templates: dict[str, Template] = {}

    def find(module: str) -> Template | None:
        kind = _KINDS.get(module)
        if kind is None:
            return None
        if kind not in templates:
            templates[kind] = Template.start(kind)
        return templates[kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service_process, "subprocess", Forking(find))
        patch.setattr(engine_launch, "subprocess", Forking(find))
        yield
