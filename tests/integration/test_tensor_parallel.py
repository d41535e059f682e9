"""A model over several ranks: the same logits, the same tokens."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from specdec.client import Client, Completion
from specdec.commands.up.cluster import Cluster, free_port
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.logit_processors import RowContext
from specdec.engine.sampling.sampler import Sampler
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine import paged_scenarios as play
from tests.support.engine.tiny_models import save_tiny_model
from tests.support.services.clusters import start_cluster
from tests.support.services.engine_processes import engine_of
from tests.support.services.faults import (
    CREDIT_WINDOW,
    Reading,
    eventually,
    held_back,
    make_request,
    plain,
    scrape,
    speculated,
)
from tests.support.services.model_pair import ModelPair
from tests.support.services.rank_probe import (
    RANDOM,
    SILENCE_FILE,
    SILENCE_S,
    ProbeReport,
    engine_settings,
    load_format_of,
    run_ranks,
    tokens_of,
)
from tests.support.services.rank_processes import all_gone, rank_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
torch.set_num_threads(1)  # the ranks need the cores

LOGIT_TOLERANCE = 1e-4
NEAR_TIE = 1e-3
TWO_RANKS = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "gpt_neox")
"""Plain; biases and tied embeddings; norms of heads; soft caps; attention that stays whole; packed heads."""
FOUR_RANKS = "llama_wide_heads"
WHOLE_ATTENTION = "phi3"
SHIPPED = "shipped"
EVERY_WAY = (FOUR_RANKS,)
"""Models that decode, roll back, fork, are preempted and verify trees; the others are prefilled in all company."""

NUM_TOKENS = 64
NUM_STREAMS = 6
NUM_BLOCKS = 20
"""Half of what the streams need at once: some are preempted."""
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n" * 3
PATIENCE_S = 60.0
LONG_S = 600.0
"""Longer than a stream, or the start of a replica, takes."""


# --- logits


@pytest.fixture(scope="module")
def model_folders(tmp_path_factory: pytest.TempPathFactory, shipped_pair: ModelPair) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    tiny = {name: save_tiny_model(name, root / name) for name in (*TWO_RANKS, FOUR_RANKS)}
    return {**tiny, SHIPPED: shipped_pair.target, RANDOM: tiny["qwen2"]}


@pytest.fixture(scope="module")
def probe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probe")


@pytest.fixture(scope="module")
def reports(model_folders: dict[str, Path], probe_folder: Path) -> dict[str, ProbeReport]:
    """What two ranks made of the models, and four of the one that has heads for them."""
    pairs = {name: folder for name, folder in model_folders.items() if name != FOUR_RANKS}
    first = run_ranks(2, pairs, probe_folder)
    (probe_folder / "store").unlink(missing_ok=True)
    return {**first, **run_ranks(4, {FOUR_RANKS: model_folders[FOUR_RANKS]}, probe_folder, EVERY_WAY)}


@pytest.mark.parametrize("name", [*TWO_RANKS, FOUR_RANKS, SHIPPED, RANDOM])
def test_ranks_together_give_the_logits_of_one(
    name: str, model_folders: dict[str, Path], reports: dict[str, ProbeReport], probe_folder: Path
) -> None:
    report, size = reports[name], 4 if name == FOUR_RANKS else 2
    alone = ModelRunner.load(engine_settings(model_folders[name], **load_format_of(name)))
    tokens = tokens_of(alone.vocab_size)
    log = play.play_alone(alone, tokens)
    expected = torch.stack([log[tuple(tokens[: i + 1])][0] for i in range(len(tokens))]).numpy()
    per_rank = [np.load(probe_folder / f"{name}-{rank}.npy") for rank in range(size)]
    assert np.abs(per_rank[0] - expected).max() < LOGIT_TOLERANCE
    assert all(np.array_equal(logits, per_rank[0]) for logits in per_rank)
    assert report.num_parameters == alone.num_parameters
    assert report.num_kv_bytes * (1 if name == WHOLE_ATTENTION else size) == alone.num_kv_bytes
    assert report.numerics_id.endswith(f"/tp{size}")
    assert alone.numerics_id.endswith("/tp1")


@pytest.mark.parametrize("name", [*TWO_RANKS, FOUR_RANKS, SHIPPED, RANDOM])
def test_a_row_has_the_same_bits_in_any_company_over_several_ranks(name: str, reports: dict[str, ProbeReport]) -> None:
    report = reports[name]
    assert report.row_invariant
    assert report.num_rows > (140 if name in EVERY_WAY else 80)
    assert report.num_unequal == 0


def test_a_rank_does_not_wait_for_a_silent_one_for_ever(reports: dict[str, ProbeReport], probe_folder: Path) -> None:
    assert reports
    assert float((probe_folder / SILENCE_FILE).read_text()) >= SILENCE_S


# --- a replica of two ranks


@pytest.fixture(scope="module")
def target_metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def split_cluster(
    shipped_pair: ModelPair, target_metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A target of two ranks with little KV memory, a draft, a coordinator."""
    settings = {
        "tensor_parallel_size": 2,
        "num_threads": 1,
        "num_blocks": NUM_BLOCKS,
        "metrics_port": target_metrics_port,
        "hold_off_ms": 100,
        "log_format": "json",
        "drain_s": LONG_S,
    }
    waits = {"target_timeout_s": LONG_S, "credit_window_tokens": CREDIT_WINDOW}
    with start_cluster(
        shipped_pair, tmp_path_factory.mktemp("split"), target_settings=settings, coordinator_settings=waits
    ) as cluster:
        yield cluster


def bodies() -> list[api.GenerateRequest]:
    """Half of them greedy; all with much of the prompt in common."""
    return [
        make_request(max_tokens=NUM_TOKENS, temperature=float(i % 2), seed=i, prompt=f"{PROMPT}        # {i}\n")
        for i in range(NUM_STREAMS)
    ]


async def complete_all(client: Client, requests: list[api.GenerateRequest]) -> list[Completion]:
    return list(await asyncio.gather(*(client.complete(body) for body in requests)))


async def test_tokens_with_speculation_equal_tokens_without_through_trees_preemption_and_the_prefix_cache(
    split_cluster: Cluster, target_metrics_port: int
) -> None:
    async with Client(split_cluster.address) as client:
        fast = await complete_all(client, bodies())
        slow = await complete_all(client, [plain(body) for body in bodies()])
        assert [c.identity for c in fast] == [c.identity for c in slow]

        async def is_preempting() -> bool:  # on a busy machine the streams may not meet at once
            if scrape(target_metrics_port).get("specdec_target_preemptions_total", 0.0) > 0:
                return True
            assert [c.identity for c in await complete_all(client, bodies())] == [c.identity for c in slow]
            return False

        await eventually(is_preempting, "a stream is preempted")
        await speculated(client, bodies()[0])
    assert all(c.require_finished().stats.num_proposed == 0 for c in slow)
    samples = scrape(target_metrics_port)
    assert samples["specdec_target_prefix_cache_hits_total"] > 0
    assert samples["specdec_target_rollbacks_total"] > 0
    assert samples["specdec_target_info"] == 1, "one rank exports metrics"
    assert any("/tp2" in name for name in samples if name.startswith("specdec_target_info{"))


async def test_every_token_of_two_ranks_is_that_of_one_or_as_good(
    split_cluster: Cluster, shipped_pair: ModelPair
) -> None:
    """The scores of two ranks differ by 1e-5 from those of one, so another token may win where two are that close."""
    alone = ModelRunner.load(engine_settings(shipped_pair.target, max_model_len=512))
    sampler = Sampler(alone.vocab_size, alone.device)
    async with Client(split_cluster.address) as client:
        prompts = [await client.tokenize(body.prompt) for body in bodies()]
        completions = await complete_all(client, bodies())
    for body, prompt, completion in zip(bodies(), prompts, completions, strict=True):
        tokens = [*prompt, *completion.choices[0].token_ids]
        assert len(tokens) == len(prompt) + NUM_TOKENS
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=body.sampling.seed, temperature=body.sampling.temperature)
        log = play.play_alone(alone, tokens)
        for place in range(len(prompt), len(tokens)):
            logits = log[tuple(tokens[:place])][0][None]
            best = sampler.candidates(logits, [RowContext(params, place, len(prompt))], 3)[0]
            scores = {candidate.token_id: candidate.score for candidate in best}
            assert scores.get(tokens[place], -np.inf) > best[0].score - NEAR_TIE, f"{body.sampling} at {place}"


@pytest.mark.long
async def test_a_rank_that_is_killed_in_mid_stream_ends_its_engine_and_the_stream_goes_on_with_another(
    split_cluster: Cluster,
) -> None:
    target = split_cluster.services["target"]
    body = make_request(max_tokens=200, temperature=1.0)
    processes = processes_of(split_cluster)
    async with held_back(split_cluster.address) as client:
        undisturbed = await client.complete(body)
        async with Reading(client, body) as stream:
            await stream.until(20)
            os.kill(processes[2].pid, signal.SIGKILL)
            await all_gone(*processes[1:])
            completion = await stream.rest()
    assert "rank 1 was killed by SIGKILL" in target.log_path.read_text()
    assert processes[0].is_running()
    assert completion.identity == undisturbed.identity


@pytest.mark.long
async def test_a_rank_that_hangs_in_mid_stream_is_named_and_all_streams_go_on_with_another_engine(
    split_cluster: Cluster,
) -> None:
    """Long before `collective_timeout_s`, which no captured step has."""
    target = split_cluster.services["target"]
    bodies = [make_request(max_tokens=200, temperature=1.0, seed=seed) for seed in range(2)]
    processes = processes_of(split_cluster)
    async with held_back(split_cluster.address) as client, Client(split_cluster.address) as other:
        undisturbed = [await client.complete(body) for body in bodies]
        async with Reading(client, bodies[0]) as stream, Reading(other, bodies[1]) as of_other:
            await stream.until(20)
            await of_other.until(20)
            processes[2].suspend()
            await all_gone(*processes[1:])
            completions = [await stream.rest(), await of_other.rest()]
    assert re.search(
        r"\(engine_stall_s\): step \d+ waits for rank 1, which did not begin it", target.log_path.read_text()
    )
    assert processes[0].is_running()
    assert [each.identity for each in completions] == [each.identity for each in undisturbed]


async def test_a_replica_of_two_ranks_drains_and_exits_with_0(split_cluster: Cluster) -> None:
    """Runs last: the target stays down."""
    target = split_cluster.services["target"]
    processes = processes_of(split_cluster)
    log_size = target.log_path.stat().st_size
    async with held_back(split_cluster.address) as client, Reading(client, make_request(max_tokens=200)) as stream:
        await stream.until(5)
        target.terminate()
        assert (await stream.rest()).num_tokens == 200
    assert await exit_code(split_cluster) == 0
    await all_gone(*processes)
    log = target.log_path.read_bytes()[log_size:].decode()
    assert '"event": "drained"' in log
    assert "rank_lost" not in log


def processes_of(cluster: Cluster) -> tuple[psutil.Process, psutil.Process, psutil.Process]:
    """The target's servicer, its engine, which is rank 0, and rank 1."""
    servicer = psutil.Process(cluster.services["target"].pid)
    engine = engine_of(cluster, "target")
    return servicer, engine, rank_of(engine)


async def exit_code(cluster: Cluster) -> int | None:
    service = cluster.services["target"]
    await asyncio.to_thread(service.wait, PATIENCE_S)
    return service.exit_code
