"""The adversary's short run: every kind of fault once, two at a time, and every answer as undisturbed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.adversary.chaos import ChaosSettings, run_chaos
from tests.adversary.pairs import subject
from tests.adversary.plan import make_short_plan
from tests.adversary.recovery import markdown, table
from tests.adversary.topology import PATHS, Topology
from tests.adversary.workload import make_requests

SEED = 4
NUM_CLIENTS = 4
"""Few, so that a small machine has cores left for services that start again."""
NUM_REQUESTS = 40


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", PATHS)
async def test_every_answer_equals_its_undisturbed_run_whatever_breaks(path: str, tmp_path: Path) -> None:
    topology = Topology(num_clients=NUM_CLIENTS, path=path)
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
