import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import pytest

from specdec.wire.sampling_params import SamplingParams


def params(**changed: Any) -> SamplingParams:
    return SamplingParams(max_tokens=8, seed=1, **changed)


def test_defaults_sample_plainly() -> None:
    plain = params()
    assert not (plain.is_greedy or plain.needs_history or plain.adjusts_logits or plain.has_cuts)


def test_temperature_zero_is_greedy_and_needs_no_cuts() -> None:
    greedy = params(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1)
    assert greedy.is_greedy
    assert not greedy.has_cuts


@pytest.mark.parametrize(
    "changed", [{"repetition_penalty": 1.1}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.5}], ids=str
)
def test_every_penalty_needs_the_history(changed: dict[str, Any]) -> None:
    assert params(**changed).needs_history
    assert params(**changed).adjusts_logits


@pytest.mark.parametrize("changed", [{"logit_bias": {3: 1.0}}, {"min_tokens": 2}, {"allowed_token_ids": (3,)}], ids=str)
def test_bias_min_tokens_and_allowed_tokens_adjust_logits_without_history(changed: dict[str, Any]) -> None:
    assert params(**changed).adjusts_logits
    assert not params(**changed).needs_history


def test_bad_words_adjust_logits_by_history() -> None:
    assert params(bad_words=((3,),)).adjusts_logits
    assert params(bad_words=((3,),)).needs_history
    assert not params(bad_words=((3,),)).has_penalties


def test_a_bad_word_bans_its_last_token_after_all_others() -> None:
    words = params(bad_words=((3,), (4, 5), (6, 4, 7), (4, 4, 8)))
    assert words.banned_after(()) == {3}
    assert words.banned_after((9, 4)) == {3, 5}
    assert words.banned_after((6, 4)) == {3, 5, 7}
    assert words.banned_after((6, 4, 4)) == {3, 5, 8}


@pytest.mark.parametrize("changed", [{"top_k": 1}, {"top_p": 0.99}, {"min_p": 0.01}], ids=str)
def test_every_cut_is_noticed(changed: dict[str, Any]) -> None:
    assert params(**changed).has_cuts


def test_replacing_a_field_works_out_the_rest_again() -> None:
    assert dataclasses.replace(params(), temperature=0.0).is_greedy


def test_ends_are_held_back_until_min_tokens() -> None:
    held = params(min_tokens=3, eos_token_ids=(9, 2), stop_token_ids=(5, 2), ignore_eos=True)
    assert list(held.min_tokens_ids) == [2, 5, 9]
    assert held.holds_back(2)
    assert not held.holds_back(3)


def test_nothing_is_held_back_where_nothing_could_end_a_choice() -> None:
    assert not params(min_tokens=3).holds_back(0)


def test_they_can_be_sent_to_another_process() -> None:
    sent = params(logit_bias={1: 2.0}, top_k=4)
    received = pickle.loads(pickle.dumps(sent))
    assert received == sent
    assert received.has_cuts


def test_the_coordinator_can_import_them_without_torch() -> None:
    code = "import sys, specdec.wire.sampling_params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
