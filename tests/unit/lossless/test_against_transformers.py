"""Tokens and log-probabilities are those that transformers computes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.engine.local_pair import MODELS, LocalPair, open_session, prompts
from tests.unit.lossless.sessions import (
    body_of,
)


@pytest.fixture(scope="module")
def reference_model() -> PreTrainedModel:
    """The target as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()


@pytest.mark.smoke
def test_greedy_decoding_is_that_of_transformers_but_for_near_ties(
    pair: LocalPair, reference_model: PreTrainedModel
) -> None:
    num_different = 0
    for index in range(4):
        body = open_session(prompts()[index], max_tokens=32)
        ours = pair.run({"a": body})["a"].token_ids
        prompt = torch.tensor([list(body.token_ids)])
        theirs = reference_model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False, num_beams=1
        )[0, prompt.shape[1] :].tolist()
        if ours != theirs:
            num_different += 1
            at = next(i for i, (a, b) in enumerate(itertools.zip_longest(ours, theirs)) if a != b)
            with torch.inference_mode():
                logits = reference_model(torch.cat([prompt, torch.tensor([ours[:at]])], 1).long()).logits[0, -1]
            assert float(logits.max() - logits[ours[at]]) < 1e-4
    assert num_different <= 1


@pytest.mark.parametrize("tight", [False, True])
def test_prompt_logprobs_are_complete_and_those_of_transformers(
    tight: bool, pair: LocalPair, tight_pair: LocalPair, reference_model: PreTrainedModel
) -> None:
    used = tight_pair if tight else pair
    used.reset()
    opens = {
        str(i): body_of({"prompt": i, "temperature": 1.0, "max_tokens": 4}, num_prompt_logprobs=3) for i in range(4)
    }
    for _ in range(2):  # the second time over a warm prefix cache
        outcomes = used.run(opens, rng=random.Random(1))
        for session_id, body in opens.items():
            token_ids = list(body.token_ids)
            with torch.inference_mode():
                logits = reference_model(torch.tensor([token_ids])).logits[0]
            expected = logits.double().log_softmax(-1)
            found = outcomes[session_id].verdicts[0].prompt_logprobs
            assert len(found) == len(token_ids) - 1
            for position, entry in enumerate(found):
                row = expected[position]
                assert entry.logprob == pytest.approx(float(row[token_ids[position + 1]]), abs=1e-4)
                assert [top.logprob for top in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_logprobs_are_those_of_transformers(pair: LocalPair, reference_model: PreTrainedModel) -> None:
    body = body_of({"prompt": 1, "temperature": 1.0, "top_k": 40, "num_logprobs": 2})
    outcome = pair.run({"a": body})["a"]
    tokens = [*body.token_ids, *outcome.token_ids]
    with torch.inference_mode():
        expected = reference_model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    entries = [entry for verdict in outcome.verdicts for entry in verdict.logprobs]
    assert len(entries) == len(outcome.token_ids)
    for position, entry in enumerate(entries, len(body.token_ids)):
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(float(row[tokens[position]]), abs=1e-4)
        assert [top.logprob for top in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
