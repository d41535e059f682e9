"""Real services whose target drafts with its own layers and window; its draft is the target without some layers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from specdec.client import Client
from specdec.v1 import coordinator_pb2 as api
from tests.support.engine.local_pair import MODELS
from tests.support.services.clusters import start_cluster
from tests.support.services.tiny_pair import ModelPair

pytestmark = pytest.mark.integration

SKIPPED = {"skip_attention_layers": [9], "skip_mlp_layers": [1, 2, 4, 5, 6]}
METHODS = ["layer_skip", "lookahead"]
USELESS = {"skip_attention_layers": [0, 1, 2], "skip_mlp_layers": [0, 1, 2, 3]}


def request(number: int, *, speculate: bool, drafters: list[str] | None = None) -> api.GenerateRequest:
    made = api.GenerateRequest(prompt=f"def number_{number}():\n    return {number}\n\n\ndef")
    made.sampling.temperature, made.sampling.seed, made.sampling.max_tokens = number / 2, number, 60
    made.sampling.ignore_eos = True
    made.speculation.enabled = speculate
    made.speculation.drafters.extend(drafters or [])
    return made


async def test_tokens_are_those_of_plain_decoding_and_origins_name_the_drafter(tmp_path: Path) -> None:
    pair = ModelPair(MODELS / "target", MODELS / "target")
    target = {"drafters": json.dumps([{"method": "layer_skip", **SKIPPED}, "lookahead"])}
    with start_cluster(pair, tmp_path / "logs", target_settings=target, draft_settings=SKIPPED) as cluster:
        async with Client(cluster.address) as client:
            assert list((await client.model_info()).drafters) == ["draft_model", *METHODS]
            for number in range(2):
                plain = await client.complete(request(number, speculate=False))
                for names in (METHODS, ["draft_model"], []):
                    drafted = await client.complete(request(number, speculate=True, drafters=names))
                    assert drafted.choices[0].token_ids == plain.choices[0].token_ids
            alone = await asyncio.gather(
                *(client.complete(request(number, speculate=True, drafters=["layer_skip"])) for number in range(3))
            )
    records = {record.name: record for each in alone for record in each.require_finished().stats.drafters}
    assert set(records) == {"layer_skip"}
    assert records["layer_skip"].num_accepted > 0


@pytest.mark.long
async def test_a_set_of_no_use_is_not_among_the_drafters(tmp_path: Path) -> None:
    pair = ModelPair(MODELS / "target", MODELS / "draft")
    target = {"drafters": json.dumps([{"method": "layer_skip", **USELESS}, "ngram"])}
    with start_cluster(pair, tmp_path / "logs", target_settings=target) as cluster:
        async with Client(cluster.address) as client:
            assert list((await client.model_info()).drafters) == ["draft_model", "ngram"]
            finished = await client.complete(request(0, speculate=True))
    assert finished.num_tokens == 60
    told = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*") if path.is_file())
    assert "drafter_off" in told
    assert "layer_skip: without attention 0-2, mlp 0-3" in told
