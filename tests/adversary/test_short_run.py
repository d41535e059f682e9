"""The adversary's short runs: every kind of fault once, two at a time, and every answer as undisturbed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.adversary.chaos import ChaosSettings, run_chaos
from tests.adversary.hosts.hosts import why_none
from tests.adversary.pairs import subject
from tests.adversary.plan import make_short_plan
from tests.adversary.recovery import markdown, table
from tests.adversary.topology import short_runs
from tests.adversary.workload import make_requests

SEED = 4
NUM_CLIENTS = 4
"""Few, so that a small machine has cores left for services that start again."""
NUM_REQUESTS = 40


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", short_runs(NUM_CLIENTS, has_hosts=False, has_clock=False))
async def test_every_answer_equals_its_undisturbed_run_whatever_breaks(name: str, tmp_path: Path) -> None:
    runs = short_runs(NUM_CLIENTS, has_hosts=why_none(tmp_path) is None, has_clock=True)
    topology = runs[name]
    models = subject("tiny", tmp_path)
    settings = ChaosSettings(
        events=make_short_plan(SEED, topology),
        requests=make_requests(12, models.sizes),
        num_requests=NUM_REQUESTS,
        seed=SEED,
    )
    lines: list[str] = [f"seed {SEED}"]
    result = await run_chaos(models.fleet(topology), settings, tmp_path, lines.append)
    sys.stdout.write("\n".join([*lines, markdown(table(result.records, result.verdict.failures))]))
    assert [(f.what, f.label, f.detail) for f in result.verdict.failures] == []
    assert result.verdict.num_done >= NUM_REQUESTS
