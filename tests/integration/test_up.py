"""`specdec up` as people run it: it starts again what dies, streams go on, and it ends when it is told to."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest

from specdec.client import Client, Completion, generate_resuming
from specdec.commands.up import placement as placement_module
from specdec.commands.up.placement import choose_placement
from specdec.commands.up.plan import LocalPlan
from specdec.commands.up.service_process import MODULES
from tests.support.services.faults import CREDIT_WINDOW, held_back, make_request
from tests.support.services.tiny_pair import ModelPair
from tests.support.services.up_command import running_up

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DEADLINE_S = 60.0
REPLICAS_AND_COORDINATOR = ("target", "draft", "coordinator")
STANDS_STILL = ("--coordinator-set", f"credit_window_tokens={CREDIT_WINDOW}")
"""A stream that is not read goes no further, so that it is under way when something dies."""


def test_where_the_draft_runs_is_measured_once_and_remembered_and_one_interrupt_stops_everything(
    tiny_pair: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_module, "_MAX_TOKENS", 8)  # any figures can be remembered
    plan = LocalPlan(target_model=str(tiny_pair.target), draft_model=str(tiny_pair.draft), device="cpu")
    said: list[str] = []
    measured = choose_placement(plan, said.append, tmp_path / "specdec" / "placement")
    assert "tokens/s measured here: apart " in str(measured)
    assert any(line.startswith("measuring apart: ") for line in said)
    assert any(line.startswith("measuring together: ") for line in said)
    compiled = os.environ.get("SPECDEC_NATIVE_CACHE") or str(Path.home() / ".cache" / "specdec" / "native")
    variables = {"SPECDEC_UP_PLACEMENT": "auto", "XDG_CACHE_HOME": str(tmp_path), "SPECDEC_NATIVE_CACHE": compiled}
    with running_up(tiny_pair, variables=variables, gateway=True) as up:
        told = up.wait_line("placement: ")
        assert "tokens/s measured here before: apart " in told
        assert told.split()[1] == measured.placement
        assert not any("measuring" in line for line in up.lines)
        children = up.children()
        # An engine is a process beside its service; templates of the tests are none of these.
        modules = [process for process in children if "-m" in process.cmdline()]
        assert len(modules) == (6 if measured.placement == "apart" else 4)
        page_url = up.wait_line("A page that shows speculation").split()[-1]
        with urllib.request.urlopen(page_url) as answer:
            assert answer.headers.get_content_type() == "text/html"
        url = up.wait_line("OpenAI's API:").split()[2].rstrip(".")
        with urllib.request.urlopen(f"{url}/models") as answer:
            assert json.load(answer)["object"] == "list"
        assert f"curl -N {url}/completions" in up.wait_line("curl")
        up.process.send_signal(signal.SIGINT)
        assert up.wait_end() == 130
        assert psutil.wait_procs(children, timeout=DEADLINE_S)[1] == []


def test_nothing_survives_a_killed_parent(tiny_pair: ModelPair) -> None:
    with running_up(tiny_pair) as up:
        children = up.children()
        up.process.kill()
        assert psutil.wait_procs(children, timeout=DEADLINE_S)[1] == []


@pytest.mark.smoke
async def test_a_stream_goes_on_exactly_while_each_service_dies_and_is_started_again(tiny_pair: ModelPair) -> None:
    body = make_request(max_tokens=400, temperature=1.0)
    with running_up(tiny_pair, STANDS_STILL) as up:
        async with Client(up.address) as client:
            undisturbed = await client.complete(body)
        to_kill = list(REPLICAS_AND_COORDINATOR)
        completion = Completion()
        async with held_back(up.address) as client:
            async for chunk in generate_resuming(client, body):
                completion.add(chunk)
                if to_kill and completion.num_tokens >= 100 * (len(REPLICAS_AND_COORDINATOR) - len(to_kill)) + 20:
                    up.service(MODULES[to_kill.pop(0)]).kill()
        assert not to_kill
        for name in REPLICAS_AND_COORDINATOR:
            died = up.wait_line(f"{name} was killed by SIGKILL; restart in 0.25 s. Its log")
            assert "Its log: " in died
            up.wait_line(f"{name} is restarted")
            up.wait_line(f"{name} is ready again")
        assert completion.identity == undisturbed.identity
        assert completion.choices[0].finished is not None
        async with Client(up.address) as client:  # on the same ports
            assert (await client.complete(body)).identity == undisturbed.identity


@pytest.mark.long
def test_an_interrupt_while_a_service_is_down_stops_everything(tiny_pair: ModelPair) -> None:
    with running_up(tiny_pair) as up:
        up.service("specdec.draft_service").kill()
        up.wait_line("draft was killed by SIGKILL; restart")
        children = up.children()
        up.process.send_signal(signal.SIGINT)
        assert up.wait_end() == 130
        assert psutil.wait_procs(children, timeout=DEADLINE_S)[1] == []
        assert not any("Traceback" in line for line in up.lines)


@pytest.mark.long
def test_a_service_that_can_never_start_again_ends_the_command_with_the_reason(
    tiny_pair: ModelPair, tmp_path: Path
) -> None:
    config = tmp_path / "coordinator.yaml"
    config.write_text("max_running: 8\n")
    with running_up(tiny_pair, variables={"SPECDEC_COORDINATOR_CONFIG": str(config)}) as up:
        children = up.children()
        config.write_text("max_runing: 8\n")
        up.service(MODULES["coordinator"]).kill()
        assert up.wait_end() == 1
        output = "\n".join(up.lines)
        assert "error: coordinator ended with exit code 2, 5 times before it was ready" in output
        assert "max_runing" in output
        assert output.count("coordinator is restarted") == 5
        assert psutil.wait_procs(children, timeout=DEADLINE_S)[1] == []
