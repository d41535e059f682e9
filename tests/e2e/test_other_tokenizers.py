"""Real services whose draft has another tokenizer: the answers of plain decoding, drafts of use, and told as what they
are.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from specdec.client import Client
from specdec.commands.models import show
from specdec.v1 import coordinator_pb2 as api
from tests.support.engine.other_tokenizers import draft_with_fewer_tokens, permuted_draft
from tests.support.services.clusters import start_cluster
from tests.support.services.model_pair import ModelPair

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n"
HOLD_OFF_MS = 200


def request(temperature: float, *, speculate: bool) -> api.GenerateRequest:
    made = api.GenerateRequest(prompt=PROMPT)
    made.sampling.temperature, made.sampling.seed, made.sampling.max_tokens = temperature, 7, 64
    made.sampling.ignore_eos = True
    made.speculation.enabled = speculate
    return made


@pytest.mark.parametrize("method", ["intersection", pytest.param("text", marks=pytest.mark.long)])
async def test_a_draft_with_another_tokenizer_serves(method: str, shipped_pair: ModelPair, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    draft = permuted_draft(folder) if method == "intersection" else draft_with_fewer_tokens(folder, 700)
    pair = ModelPair(shipped_pair.target, draft)
    with start_cluster(pair, tmp_path / "logs", target_settings={"hold_off_ms": HOLD_OFF_MS}) as cluster:
        async with Client(cluster.address) as client:
            num_accepted = 0
            for temperature in (0.0, 0.7, 1.0):
                plain = await client.complete(request(temperature, speculate=False))
                drafted = await client.complete(request(temperature, speculate=True))
                assert drafted.identity == plain.identity
                num_accepted += drafted.require_finished().stats.num_accepted
            info, status = await client.model_info(), await client.status()
    assert num_accepted > 20
    told = info.draft.draft_vocabulary
    assert (told.method, told.num_target) == (method, 4096)
    assert info.draft.tokenizer_digest == info.target.tokenizer_digest != told.tokenizer_digest
    output = Console(width=200, record=True, quiet=False)
    show(output, info, status)
    assert f"has {told.num_shared} of 4096 tokens" in output.export_text()


@pytest.mark.long
async def test_a_target_drafts_what_is_shared_by_itself(shipped_pair: ModelPair, tmp_path: Path) -> None:
    pair = ModelPair(shipped_pair.target, draft_with_fewer_tokens(tmp_path / "draft", 2500))
    with start_cluster(pair, tmp_path / "logs", placement="together") as cluster:
        async with Client(cluster.address) as client:
            plain = await client.complete(request(0.7, speculate=False))
            drafted = await client.complete(request(0.7, speculate=True))
    assert drafted.identity == plain.identity
    assert drafted.require_finished().stats.num_accepted > 0
