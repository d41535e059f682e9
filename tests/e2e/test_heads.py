"""Real services whose target runs heads over its hidden states, in one process and in two ranks."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from specdec.client import Client
from specdec.commands.up.cluster import ClusterFailed
from specdec.v1 import coordinator_pb2 as api
from tests.support.heads import checkpoints
from tests.support.services.clusters import start_cluster
from tests.support.services.tiny_pair import ModelPair

pytestmark = pytest.mark.integration

METHODS = ["dspark", "eagle3"]


def drafters(pair: ModelPair, folder: Path) -> str:
    """The setting, over heads of random weights."""
    config = json.loads((pair.target / "config.json").read_text())
    sizes = checkpoints.Sizes(vocab=config["vocab_size"], target=config["hidden_size"])
    ids = {"eagle3": "eagle_aux_hidden_state_layer_ids", "dspark": "aux_hidden_state_layer_ids"}
    made = {
        method: checkpoints.save(folder / method, *getattr(checkpoints, method)(sizes, **{ids[method]: [0, 1, 2]}))
        for method in METHODS
    }
    return json.dumps([{"method": method, "model": str(path)} for method, path in made.items()])


def request(number: int, *, speculate: bool) -> api.GenerateRequest:
    made = api.GenerateRequest(prompt=f"def number_{number}(): return {number}")
    made.sampling.temperature, made.sampling.seed, made.sampling.max_tokens = float(number % 2), number, 60
    made.sampling.ignore_eos = True
    made.speculation.enabled = speculate
    return made


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_tokens_are_those_of_plain_decoding(num_ranks: int, tiny_pair: ModelPair, tmp_path: Path) -> None:
    settings = {
        "drafters": drafters(tiny_pair, tmp_path),
        "tensor_parallel_size": num_ranks,
        "adaptive_speculation": False,  # whether heads pay depends on how busy the machine is
    }
    with start_cluster(tiny_pair, tmp_path / "logs", target_settings=settings) as cluster:
        async with Client(cluster.address) as client:
            assert list((await client.model_info()).drafters) == ["draft_model", *METHODS]
            plain = await asyncio.gather(*(client.complete(request(n, speculate=False)) for n in range(4)))
            drafted = await asyncio.gather(*(client.complete(request(n, speculate=True)) for n in range(4)))
    assert [each.identity for each in drafted] == [each.identity for each in plain]
    offered: Counter[str] = Counter()  # of all: who is asked for one request goes by what calls take
    for each in drafted:
        offered.update({record.name: record.num_proposed for record in each.require_finished().stats.drafters})
    assert min(offered[method] for method in METHODS) > 0


def test_a_head_that_does_not_fit_stops_the_target_with_the_reason(tiny_pair: ModelPair, tmp_path: Path) -> None:
    config, tensors = checkpoints.eagle3(checkpoints.Sizes(vocab=50, target=32))
    folder = checkpoints.save(tmp_path / "head", config, tensors)
    settings = {"drafters": json.dumps([{"method": "eagle3", "model": str(folder)}])}
    with pytest.raises(ClusterFailed, match=r"drafters: eagle3: .*"):
        start_cluster(tiny_pair, tmp_path / "logs", target_settings=settings)
