"""The coordinator's log of requests that ended: `specdec plan` reads it as a trace of lengths and times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from specdec.plan.inputs.trace_file import read_trace
from specdec.wire.errors import SpecdecError
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import collect, error_of, request, running

pytestmark = pytest.mark.integration
TEXTS = ("token_ids", "text", "prompt", "messages")


async def ends(**settings: Any) -> list[dict[str, Any]]:
    """Lines of two requests that end well, and of one that is refused."""
    with capture_logs() as lines:
        async with running([ScriptedTarget()], **settings) as harness:
            await collect(harness.stub.Generate(request((5, 6, 7))))
            await collect(harness.stub.Generate(request((5, 6, 7, 8, 9), max_tokens=4)))
            assert isinstance(await error_of(harness.stub.Generate(request((1 << 31,)))), SpecdecError)
    return [dict(line) for line in lines if line["event"] == "request_ended"]


async def test_a_request_that_ended_is_logged_with_its_lengths_and_none_of_its_text() -> None:
    lines = await ends(access_log=True)
    assert [line["log_level"] for line in lines] == ["info"] * 3
    assert [(line.get("prompt_tokens"), line.get("output_tokens")) for line in lines] == [(3, 20), (5, 4), (None, None)]
    assert not any(name in line for line in lines for name in TEXTS)
    assert {line["log_level"] for line in await ends()} == {"debug"}


async def test_the_log_is_a_trace(tmp_path: Path) -> None:
    lines = await ends(access_log=True)
    file = tmp_path / "coordinator.log"
    told = [
        {"timestamp": f"2026-11-27T08:00:0{at}.000000Z", "level": "info", "service": "coordinator", **line}
        for at, line in enumerate(lines, 1)
    ]
    other = {"timestamp": "2026-11-27T08:00:00Z", "level": "info", "service": "coordinator", "event": "ready"}
    file.write_text("".join(json.dumps(line) + "\n" for line in [other, *told]))
    trace = read_trace(file, None)
    assert [(each.prompt_tokens, each.output_tokens) for each in trace.requests] == [(3, 20), (5, 4)]
    assert trace.num_left_out == 1
    expected_s = 1.0 - (told[1]["duration_s"] - told[0]["duration_s"])
    assert [each.at_s for each in trace.requests] == pytest.approx([0.0, expected_s], abs=1e-5)
