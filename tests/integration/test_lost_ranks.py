"""An engine process whose other rank ends or hangs: no rank goes on without the others, and the servicer learns why."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from specdec.config import TargetSettings
from specdec.replica.bridge.engine_process import EngineProcess
from tests.support.engine.tiny_models import save_tiny_model
from tests.support.scripted.model import make_tokenizer
from tests.support.services.faults import eventually
from tests.support.services.rank_processes import all_gone, rank_of, ranks_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

COLLECTIVE_TIMEOUT_S = 6.0
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = save_tiny_model("llama", tmp_path_factory.mktemp("model"))
    make_tokenizer().save(str(model / "tokenizer.json"))
    return model


@asynccontextmanager
async def split_engine(model: Path) -> AsyncIterator[EngineProcess]:
    """An engine process that starts a second rank; not ready yet."""
    settings = TargetSettings(
        model=str(model),
        device="cpu",
        tensor_parallel_size=2,
        num_blocks=64,
        collective_timeout_s=COLLECTIVE_TIMEOUT_S,
    )
    engine = EngineProcess("specdec.target_service.worker:run_engine", settings, service="target-engine")
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop(PATIENCE_S)


def process_of(engine: EngineProcess) -> psutil.Process:
    return psutil.Process(engine.pid)


async def started_rank(engine: EngineProcess) -> psutil.Process:
    """Rank 1, as soon as it is there."""
    process = process_of(engine)

    async def has_rank() -> bool:
        return bool(ranks_of(process))

    await eventually(has_rank, "a rank is started")
    return rank_of(process)


async def reason_of_end(engine: EngineProcess) -> str:
    return await asyncio.wait_for(engine.wait_exited(), PATIENCE_S)


async def test_an_idle_engine_notices_a_rank_that_stays_stopped_and_kills_it(model: Path) -> None:
    async with split_engine(model) as engine:
        await engine.wait_ready()
        rank = rank_of(process_of(engine))
        rank.suspend()
        assert (await reason_of_end(engine)).startswith("RankLost: rank 1 has been stopped by a signal for ")
        await all_gone(rank)


async def test_the_servicer_learns_which_rank_was_lost_while_loading(model: Path) -> None:
    async with split_engine(model) as engine:
        rank = await started_rank(engine)
        os.kill(rank.pid, signal.SIGKILL)
        assert await reason_of_end(engine) == "RankLost: rank 1 was killed by SIGKILL"


async def test_no_rank_outlives_a_rank_0_that_is_killed(model: Path) -> None:
    async with split_engine(model) as engine:
        rank = await started_rank(engine)
        process_of(engine).kill()
        await all_gone(rank)
