"""Drafts that say a block of tokens in one pass, held against the formula: masks after the last token, one pass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.config import DraftSettings
from specdec.engine.errors import ModelLoadError
from specdec.engine.sampling.sampler import RowContext, Sampler, TokenHistory
from specdec.engine.tree import TokenTree
from specdec.replica.worker.build import build_engine
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.parallel_drafts import MASK_TOKEN, draft_with_a_mask
from tests.support.engine.rejection import REJECTION
from tests.support.engine.worker_client import WorkerClient

BLOCK = 5
PROMPT = prompts()[0][:20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draft_with_a_mask(tmp_path_factory.mktemp("parallel") / "draft")


@pytest.fixture(scope="module")
def loaded_pair(folder: Path) -> LocalPair:
    return LocalPair(draft=str(folder), draft_options={"max_draft_tokens": BLOCK, "max_ahead_tokens": BLOCK})


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def client(loaded_pair: LocalPair) -> Iterator[WorkerClient]:
    client = WorkerClient(loaded_pair, "draft")
    client.attach()
    yield client
    client.end_all()
    client.check_nothing_held()


def block_logits(model: PreTrainedModel, token_ids: list[int], num_tokens: int) -> torch.Tensor:
    """[num_tokens, V]: of the last token, then of each mask."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*token_ids, *([MASK_TOKEN] * (num_tokens - 1))]])).logits[0]
    return logits[-num_tokens:].float()


def main_tokens(client: WorkerClient, session_id: str = "s") -> list[int]:
    session = client.session(session_id)
    return [session.tree.token_ids[node] for node in session.main_path]


def test_rows_of_masks_are_those_of_the_model_given_the_masks(folder: Path, reference: PreTrainedModel) -> None:
    engine = build_engine(DraftSettings(model=str(folder), num_threads=1, num_blocks=8)).engine
    seq = engine.add(PROMPT, num_prompt_tokens=len(PROMPT))
    seq.tree = TokenTree([MASK_TOKEN] * (BLOCK - 1))
    output = engine.step()
    assert output is not None
    torch.testing.assert_close(output.logits, block_logits(reference, PROMPT, BLOCK), rtol=1e-5, atol=1e-5)


def test_a_block_is_drafted_in_the_step_that_computes_the_prompt(
    client: WorkerClient, reference: PreTrainedModel
) -> None:
    client.entry("s", open=open_session(PROMPT, max_tokens=40, ignore_eos=True))
    steps = client.engine.stats()
    client.turn(1)
    assert main_tokens(client) == block_logits(reference, PROMPT, BLOCK)[:, :4096].argmax(1).tolist()
    assert client.engine.stats().preemptions == steps.preemptions


def test_the_next_block_follows_what_was_committed_and_attends_to_no_mask(
    client: WorkerClient, reference: PreTrainedModel
) -> None:
    client.entry("s", open=open_session(PROMPT, max_tokens=40, ignore_eos=True))
    client.turn(4)
    drafted = main_tokens(client)
    committed = [*PROMPT, *drafted[:2], 9]
    client.entry("s", commit=pb.Commit(start_position=20, token_ids=committed[20:]))
    client.turn(4)
    expected = block_logits(reference, committed, BLOCK)[:, :4096].argmax(1).tolist()
    assert main_tokens(client)[: len(expected)] == expected


def test_each_token_is_drawn_with_the_noise_of_its_position(client: WorkerClient, reference: PreTrainedModel) -> None:
    body = open_session(PROMPT, max_tokens=40, ignore_eos=True, temperature=1.0, seed=5, presence_penalty=0.4)
    client.entry("s", open=body)
    client.turn(1)
    drafted = main_tokens(client)
    params = SamplingParams(temperature=1.0, seed=5, presence_penalty=0.4, max_tokens=40, ignore_eos=True)
    logits, history = block_logits(reference, PROMPT, BLOCK), TokenHistory(PROMPT)
    sampler, expected = Sampler(4096, "cpu"), list[int]()
    for depth in range(len(drafted)):
        row = RowContext(
            params=params,
            position=len(PROMPT) + depth,
            num_prompt_tokens=len(PROMPT),
            history=history,
            extra_tokens=tuple(expected),
        )
        [token] = sampler.sample(logits[depth : depth + 1], [row])
        assert token is not None
        expected.append(token)
    assert drafted == expected
    assert drafted


def test_a_chain_for_rejection_is_as_long_as_the_session_says(client: WorkerClient) -> None:
    body = open_session(PROMPT, verify_mode=REJECTION, max_tokens=40, temperature=1.0, body={"max_draft_tokens": 3})
    client.entry("s", open=body)
    client.turn(3)
    assert len(main_tokens(client)) == 3


def test_no_more_is_drafted_than_the_output_may_have(client: WorkerClient) -> None:
    client.entry("s", open=open_session(PROMPT, max_tokens=2, ignore_eos=True))
    client.turn(3)
    assert len(main_tokens(client)) == 2


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
def test_both_keys_of_configs_are_known(key: str, tmp_path: Path) -> None:
    assert mask_of(draft_with_a_mask(tmp_path / "draft", key)) == MASK_TOKEN


def test_it_can_be_switched_off_and_a_model_without_a_mask_cannot_be_told_to(tmp_path: Path) -> None:
    folder = draft_with_a_mask(tmp_path / "draft")
    assert mask_of(folder, parallel_drafting=False) is None
    with pytest.raises(ModelLoadError, match="has none of pard_token, ptd_token_id"):
        mask_of(folder, key=None, parallel_drafting=True)


@pytest.mark.parametrize("mask", [MASK_TOKEN + 1, -1, "x", True])
def test_a_mask_that_the_embedding_does_not_have_is_refused(mask: object, tmp_path: Path) -> None:
    folder = draft_with_a_mask(tmp_path / "draft")
    with pytest.raises(ModelLoadError, match="not an id below 4097"):
        mask_of(folder, key=mask)


_AS_IT_IS: Any = object()


def mask_of(folder: Path, key: object = _AS_IT_IS, **settings: Any) -> int | None:
    """What a draft is built with. `key`: another value of pard_token; None takes it away."""
    if key is not _AS_IT_IS:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config["pard_token"] = key
        path.write_text(json.dumps(config))
    return build_engine(DraftSettings(model=str(folder), num_threads=1, num_blocks=8, **settings)).mask_token_id
