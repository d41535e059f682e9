"""The target without some of its sublayers drafts over its own blocks, and gives the tokens of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config.drafter_options import (
    DrafterOptions,
    LayerSkipOptions,
    NgramOptions,
    SuffixOptions,
)
from specdec.drafting.heads.session import HeadAsk
from specdec.drafting.interface import Offer
from specdec.drafting.layer_skip.drafter import LayerSkip
from specdec.engine.errors import ModelLoadError
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.outcomes import Outcome
from tests.unit.lossless.cases import CASES
from tests.unit.lossless.sessions import Plainly, assert_all_equal, assert_equal, body_of, examples, many_examples

CHOSEN = LayerSkipOptions(skip_attention_layers=(9,), skip_mlp_layers=(1, 2, 4, 5, 6))
SETS = {
    "chosen sublayers": CHOSEN,
    "early exit": LayerSkipOptions(exit_layer=7, num_speculations=3),
    "every other one": LayerSkipOptions(max_search_share=0),
    "searched": LayerSkipOptions(max_search_share=0.5),
}
USELESS = LayerSkipOptions(skip_attention_layers=(0, 1, 2), skip_mlp_layers=(0, 1, 2, 3))


@pytest.fixture
def restored(loaded_pair: LocalPair) -> Iterator[LocalPair]:
    yield loaded_pair
    loaded_pair.reset()


def check(
    pair: LocalPair,
    plainly: Plainly,
    drafters: Sequence[DrafterOptions],
    opens: dict[str, pb.OpenSession],
    own_draft: bool = False,
    **how: object,
) -> dict[str, Outcome]:
    expected = {key: plainly(body) for key, body in opens.items()}
    pair.reset(own_draft=own_draft, drafters=drafters)
    outcomes = pair.run(opens, **how)  # type: ignore[arg-type]
    for key, outcome in outcomes.items():
        assert_equal(outcome, expected[key])
    assert pair.verifier.local_drafters.names == [each.method for each in drafters]
    return outcomes


def drafter(pair: LocalPair) -> LayerSkip:
    found = pair.verifier.local_drafters._drafters["layer_skip"]
    assert isinstance(found, LayerSkip)
    return found


@pytest.mark.parametrize("name", SETS)
def test_each_set_changes_no_token_over_the_table_and_is_accepted(
    name: str, restored: LocalPair, plainly: Plainly
) -> None:
    num_accepted = 0
    for first in range(0, len(CASES), 8):
        opens = {str(i): body_of(case) for i, case in enumerate(CASES[first : first + 8])}
        outcomes = check(restored, plainly, [SETS[name]], opens, use_draft=False)
        num_accepted += sum(outcome.num_of("layer_skip", "num_accepted") for outcome in outcomes.values())
        assert {each for outcome in outcomes.values() for each in outcome.accepted_by} <= {"layer_skip"}
    assert num_accepted > 100


@given(seed=st.integers(0, 2**32))
@examples
def test_beside_others_and_a_draft_it_changes_no_token(restored: LocalPair, plainly: Plainly, seed: int) -> None:
    check_random_set(restored, plainly, seed)


@pytest.mark.long
@given(seed=st.integers(0, 2**32))
@many_examples
def test_many_more_sets_change_no_token(restored: LocalPair, plainly: Plainly, seed: int) -> None:
    check_random_set(restored, plainly, seed)


def check_random_set(pair: LocalPair, plainly: Plainly, seed: int) -> None:
    rng = random.Random(seed)
    plain: list[DrafterOptions] = [NgramOptions(prompt_lookup_min=1), SuffixOptions()]
    drafters = [SETS[rng.choice(sorted(SETS))], *rng.sample(plain, rng.randrange(3))]
    how = {"rng": rng, "use_draft": rng.random() < 0.5, "verify_all": rng.random() < 0.7}
    opens = {str(i): body_of(case) for i, case in enumerate(rng.sample(CASES, 5))}
    check(pair, plainly, drafters, opens, own_draft=rng.random() < 0.3, **how)


@pytest.mark.parametrize("name", ["chosen sublayers", "searched"])
def test_preemption_chunks_of_prompts_and_choices_that_share_one_change_no_token(
    name: str, tight_pair: LocalPair, plainly: Plainly
) -> None:
    case = {"prompt": 2, "temperature": 1.0}
    for salt in (b"layers", b"layers"):  # the second time most of the prompt is in the prefix cache
        opens = {
            str(i): body_of({**case, "choice": i}, cache_salt=salt, **({"fork_from": "0"} if i else {}))
            for i in range(3)
        }
        opens |= {str(i): body_of({"prompt": i % 4, "temperature": 0.0}) for i in range(3, 6)}
        check(tight_pair, plainly, [SETS[name]], opens, use_draft=False)
    tight_pair.reset()


def test_modules_that_are_not_fused_draft_as_well(restored: LocalPair, plainly: Plainly) -> None:
    opens = {str(i): body_of({"prompt": i, "temperature": float(i % 2)}) for i in range(3)}
    fused = check(restored, plainly, [CHOSEN], opens, use_draft=False)
    pair = LocalPair(fused="off")
    pair.reset(drafters=[CHOSEN])
    outcomes = pair.run(opens, use_draft=False)
    for key, outcome in outcomes.items():
        assert outcome.token_ids == fused[key].token_ids
        # How far a draft goes is a matter of what it costs there and then, so that counts differ.
        assert outcome.num_accepted > 0 and fused[key].num_accepted > 0


def test_the_search_finds_better_sets_within_its_share_of_the_time(restored: LocalPair, plainly: Plainly) -> None:
    opens = {str(i): open_session(prompts()[i][:60], max_tokens=60, ignore_eos=True) for i in range(3)}
    check(restored, plainly, [LayerSkipOptions(max_search_share=0.5)], opens, use_draft=False)
    found = drafter(restored)
    assert found.search is not None
    first = found.search.best
    found.max_search_share = 1e9
    for _ in range(3):
        assert_all_equal(restored.run(opens, use_draft=False), opens, plainly)
    assert found.search.num_trials > 30
    assert found.search.best != first
    assert found.skipped == found.search.skipped
    registry = restored.target_registry
    assert registry.get_sample_value("specdec_target_layer_search_seconds_total") == pytest.approx(found.search_s)
    assert registry.get_sample_value("specdec_target_layer_matchness_ratio") == found.search.matchness
    found.max_search_share = 0.0
    num_trials = found.search.num_trials
    restored.run(opens, use_draft=False)
    assert found.search.num_trials == num_trials


def test_a_set_that_says_nothing_of_the_target_is_switched_off_at_load(restored: LocalPair, plainly: Plainly) -> None:
    body = body_of({"prompt": 0, "temperature": 0.0})
    expected = plainly(body)
    restored.reset(drafters=[NgramOptions(), USELESS])
    assert restored.verifier.local_drafters.names == ["ngram"]
    assert_equal(restored.run({"a": body}, use_draft=False)["a"], expected)
    dropped = {"drafter": "layer_skip"}
    assert restored.target_registry.get_sample_value("specdec_target_drafters_dropped_total", dropped) == 1


def test_one_whose_guesses_are_never_right_is_switched_off_while_serving(restored: LocalPair, plainly: Plainly) -> None:
    opens = {
        str(i): open_session(prompts()[i][:40], max_tokens=120, temperature=1.5, ignore_eos=True) for i in range(10)
    }
    for body in opens.values():
        plainly(body)
    restored.reset(drafters=[CHOSEN])
    found = drafter(restored)
    run = found.run
    found._drawing, found.run = None, lambda batch: -run(batch)  # type: ignore[assignment]
    outcomes = restored.run(opens, use_draft=False)
    assert_all_equal(outcomes, opens, plainly)
    assert restored.verifier.local_drafters.names == []


def test_one_that_raises_in_mid_stream_is_dropped_and_costs_nobody_a_token(
    restored: LocalPair, plainly: Plainly
) -> None:
    opens = {str(i): body_of({"prompt": i, "temperature": float(i % 2)}) for i in range(3)}
    for body in opens.values():
        plainly(body)
    restored.reset(drafters=[NgramOptions(), CHOSEN])
    found = drafter(restored)
    num_calls = 0
    draft = found.draft

    def failing(asks: Sequence[HeadAsk]) -> list[Offer | None]:
        nonlocal num_calls
        num_calls += 1
        offers = draft(asks)  # what it has written by then is written over
        if num_calls >= 3:
            raise RuntimeError("broken on purpose")
        return offers

    found.draft = failing  # type: ignore[method-assign]
    assert_all_equal(restored.run(opens, use_draft=False), opens, plainly)
    assert restored.verifier.local_drafters.names == ["ngram"]
    assert num_calls == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LayerSkipOptions(exit_layer=10), "exit_layer: 10 is not between 1 and 9"),
        (LayerSkipOptions(skip_mlp_layers=(12,)), "skip_mlp_layers: the model has layers 0 to 9, not 12"),
    ],
)
def test_layers_that_are_not_there_are_refused_by_name(
    options: LayerSkipOptions, message: str, restored: LocalPair
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        restored.reset(drafters=[options])
