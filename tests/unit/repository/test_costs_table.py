"""The page on capacity says what the worst request of each route and of each method costs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client import CollectorRegistry

from specdec.config import CoordinatorSettings
from specdec.coordinator.service import CoordinatorService
from specdec.gateway.app import build_app
from specdec.gateway.service import Gateway
from specdec.gateway.settings import GatewaySettings
from specdec.v1 import coordinator_pb2, draft_pb2, open_inference_pb2, target_pb2
from tests.costs.memory import shipped_limits
from tests.support.costly.methods import METHODS

PAGE = Path(__file__).parents[3] / "docs/capacity.md"


def table() -> str:
    """The rows of the page's table of worst requests."""
    _, _, rest = PAGE.read_text().partition("### The worst request")
    return "\n".join(line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| "))


def rows() -> dict[str, list[str]]:
    """Figures by the names of a row."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table().splitlines()[1:]]
    return {name: figures for names, *figures in cells for name in re.findall(r"`([^`]+)`", names)}


def described() -> dict[str, Any]:
    async def paths() -> dict[str, Any]:
        gateway = Gateway(GatewaySettings(coordinators=["localhost:1"]))
        try:
            found: dict[str, Any] = build_app(gateway.parts).openapi()["paths"]
        finally:
            await gateway.stop(0)
        return found

    return asyncio.run(paths())


def test_each_route_has_a_row_or_takes_no_body() -> None:
    named = rows()
    for path, methods in described().items():
        for verb, told in methods.items():
            assert path in named or ("requestBody" not in told and verb == "get"), path
    assert any("routes without a body" in line for line in table().splitlines())


def test_each_method_has_a_row_and_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    served: dict[str, list[str]] = {
        service.name: [method.name for method in service.methods]
        for file in (coordinator_pb2, open_inference_pb2, target_pb2, draft_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
    }

    def note(name: str, handlers: dict[str, Any]) -> Any:
        served.setdefault(name.rpartition(".")[2], []).extend(handlers)

    class Server:
        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            pass

    async def register() -> None:
        settings = CoordinatorSettings(targets=("localhost:1",), metrics_port=None)
        CoordinatorService(settings, CollectorRegistry()).register(Server())  # type: ignore[arg-type]

    monkeypatch.setattr(grpc, "method_handlers_generic_handler", note)
    asyncio.run(register())
    all_methods = {f"{service}/{method}" for service, methods in served.items() for method in methods}
    assert METHODS.keys() == all_methods
    named = rows()
    for method in METHODS:
        assert method in named, method


def test_each_row_has_all_figures() -> None:
    for name, (shapes, loop, processor, memory) in rows().items():
        assert int(shapes) > 0, name
        for cell, unit in ((loop, "ms"), (processor, "ms"), (memory, "MiB")):
            assert re.match(rf"\d+ {unit}|the same", cell), (name, cell)


def test_shipped_memory_limits_are_those_that_were_measured_and_leave_a_third() -> None:
    _, _, rest = PAGE.read_text().partition("### Memory under the worst load")
    lines = [
        line for line in rest.partition("\n### ")[0].splitlines() if re.match(r"\| (target|draft|coord|gateway)", line)
    ]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    told = {name: (int(limit.split()[0]), int(most.split()[0])) for name, limit, _, most, *_ in cells}
    assert {name: limit for name, (limit, _) in told.items()} == {
        name: limit // 2**20 for name, limit in shipped_limits().items()
    }
    assert all(most * 3 <= limit * 2 for limit, most in told.values())
    chart = yaml.safe_load((PAGE.parents[1] / "helm/specdec/values.yaml").read_text())
    for name in ("coordinator", "gateway"):
        assert chart[name]["resources"]["limits"]["memory"] == {512: "512Mi", 1024: "1Gi"}[told[name][0]]
