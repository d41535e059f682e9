"""Heads over the target's hidden states, alone and together with others, give the tokens of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.config.drafter_options import (
    DFlashOptions,
    DrafterOptions,
    DSparkOptions,
    Eagle3Options,
    EagleOptions,
    HeadOptions,
    MedusaOptions,
    MtpOptions,
    NgramOptions,
    PEagleOptions,
    SuffixOptions,
)
from specdec.drafting.heads.methods.registry import CAPABILITIES, make_head
from specdec.drafting.heads.serial import SerialHead
from specdec.drafting.heads.session import HeadAsk
from specdec.drafting.heads.target import HeadTarget
from specdec.drafting.interface import Offer
from specdec.target_service.pacing.expectations import Expectations
from specdec.target_service.proposals.session_drafters import DrafterInSession
from specdec.v1 import common_pb2 as pb
from tests.support.engine.fickle_gates import Closed
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.heads import checkpoints
from tests.support.heads.checkpoints import Sizes
from tests.support.heads.fitted import right_eagle
from tests.unit.lossless.cases import CASES
from tests.unit.lossless.sessions import Plainly, assert_all_equal, assert_equal, body_of, examples, many_examples

SIZES = Sizes(vocab=4096, target=384)
FEW = Sizes(vocab=4096, target=384, draft=700)
AS_WIDE = Sizes(vocab=4096, target=384, width=384)
MAKERS: dict[str, tuple[type[HeadOptions], Callable[[], tuple[dict, checkpoints.Tensors]]]] = {  # type: ignore[type-arg]
    "medusa": (MedusaOptions, lambda: checkpoints.medusa(SIZES)),
    "medusa, fewer tokens": (MedusaOptions, lambda: checkpoints.old_medusa(FEW)),
    "eagle": (EagleOptions, lambda: checkpoints.eagle(AS_WIDE)),
    "eagle3": (Eagle3Options, lambda: checkpoints.eagle3(FEW)),
    "eagle3.1": (Eagle3Options, lambda: checkpoints.eagle3(SIZES, fc_norm=True, norm_output=True, num_layers=2)),
    "peagle": (PEagleOptions, lambda: checkpoints.peagle(FEW)),
    "mtp": (MtpOptions, lambda: checkpoints.mtp(AS_WIDE)),
    "dflash": (DFlashOptions, lambda: checkpoints.dflash(FEW)),
    "dspark": (DSparkOptions, lambda: checkpoints.dspark(SIZES, kind="rnn")),
}
RIGHT = "an eagle that is often right"


@pytest.fixture(scope="module")
def options(loaded_pair: LocalPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, HeadOptions]:
    folder = tmp_path_factory.mktemp("heads")
    made = {
        name: kind(model=str(checkpoints.save(folder / name, *make())))  # type: ignore[call-arg]
        for name, (kind, make) in MAKERS.items()
    }
    made[RIGHT] = right_eagle(loaded_pair, folder / "right")
    return made


@pytest.fixture
def always_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a head is asked less on a busy machine, as what it brings is held against the time that it takes."""
    monkeypatch.setattr(DrafterInSession, "judge", lambda part, credit, cost_tokens: None)
    monkeypatch.setattr(Expectations, "is_worth_asking", lambda expectations, source, asks, cost_s: True)


@pytest.fixture
def restored(loaded_pair: LocalPair) -> Iterator[LocalPair]:
    yield loaded_pair
    loaded_pair.reset()


def check(
    pair: LocalPair,
    plainly: Plainly,
    drafters: Sequence[DrafterOptions],
    opens: dict[str, pb.OpenSession],
    **how: object,
) -> int:
    """Run sessions beside these drafters; returns how many tokens they proposed that were taken."""
    expected = {key: plainly(body) for key, body in opens.items()}
    pair.reset(own_draft=bool(how.pop("own_draft", False)), drafters=drafters)
    outcomes = pair.run(opens, **how)  # type: ignore[arg-type]
    for key, outcome in outcomes.items():
        assert_equal(outcome, expected[key])
    assert pair.verifier.local_drafters.names == [each.method for each in drafters]
    return sum(outcome.num_accepted for outcome in outcomes.values())


def test_all_heads_there_are_are_tested() -> None:
    assert {kind.model_fields["method"].default for kind, _ in MAKERS.values()} == set(CAPABILITIES)


@pytest.mark.usefixtures("always_asked")
@pytest.mark.parametrize("name", [*MAKERS, RIGHT])
def test_each_alone_changes_no_token_over_the_table(
    name: str, options: dict[str, HeadOptions], restored: LocalPair, plainly: Plainly
) -> None:
    num_accepted = 0
    cases = CASES if name == RIGHT else CASES[list(MAKERS).index(name) % 2 :: 2]  # every case with half of the heads
    for first in range(0, len(cases), 8):
        opens = {str(i): body_of(case) for i, case in enumerate(cases[first : first + 8])}
        num_accepted += check(restored, plainly, [options[name]], opens, use_draft=False)
    if name == RIGHT:
        assert num_accepted > 100


@pytest.mark.smoke
@given(seed=st.integers(0, 2**32))
@examples
def test_random_sets_of_heads_and_others_beside_a_draft_change_no_token(
    options: dict[str, HeadOptions], restored: LocalPair, plainly: Plainly, seed: int
) -> None:
    check_random_set(options, restored, plainly, seed)


@pytest.mark.long
@given(seed=st.integers(0, 2**32))
@many_examples
def test_many_more_sets_change_no_token(
    options: dict[str, HeadOptions], restored: LocalPair, plainly: Plainly, seed: int
) -> None:
    check_random_set(options, restored, plainly, seed)


def check_random_set(options: dict[str, HeadOptions], pair: LocalPair, plainly: Plainly, seed: int) -> None:
    rng = random.Random(seed)
    plain: list[DrafterOptions] = [NgramOptions(prompt_lookup_min=1), SuffixOptions()]
    names = rng.sample([*MAKERS, RIGHT], rng.randrange(1, 5))
    by_method: dict[str, DrafterOptions] = {options[name].method: options[name] for name in names}  # type: ignore[misc]
    by_method |= {each.method: each for each in rng.sample(plain, rng.randrange(3))}
    how = {"rng": rng, "use_draft": rng.random() < 0.6, "own_draft": rng.random() < 0.3}
    opens = {str(i): body_of(case) for i, case in enumerate(rng.sample(CASES, 5))}
    check(pair, plainly, list(by_method.values()), opens, verify_all=rng.random() < 0.7, **how)


@pytest.mark.parametrize("name", ["eagle3", "peagle", "dspark", "mtp", RIGHT])
def test_preemption_chunks_of_prompts_and_choices_that_share_one_change_no_token(
    name: str, options: dict[str, HeadOptions], tight_pair: LocalPair, plainly: Plainly
) -> None:
    case = {"prompt": 2, "temperature": 1.0}
    for salt in (b"heads", b"heads"):  # the second time most of the prompt is in the prefix cache
        opens = {
            str(i): body_of({**case, "choice": i}, cache_salt=salt, **({"fork_from": "0"} if i else {}))
            for i in range(3)
        }
        opens |= {str(i): body_of({"prompt": i % 4, "temperature": 0.0}) for i in range(3, 6)}
        check(tight_pair, plainly, [options[name]], opens, use_draft=False)
    tight_pair.reset()


def test_heads_come_and_go_while_sessions_run(
    options: dict[str, HeadOptions], restored: LocalPair, plainly: Plainly
) -> None:
    opens = {str(i): body_of({"prompt": i, "temperature": float(i % 2), "max_tokens": 60}) for i in range(4)}
    for body in opens.values():
        plainly(body)
    restored.reset(drafters=[NgramOptions()])
    built = restored.target_built
    target = HeadTarget(built.model, built.engine, built.sampler)
    rng = random.Random(5)
    heads = {options[name].method: make_head(options[name], target) for name in ("dflash", "medusa", RIGHT)}

    def disturb(pair: LocalPair) -> None:
        name = rng.choice(sorted(heads))
        if name in pair.verifier.local_drafters.names:
            pair.verifier.local_drafters.remove(name)
        else:
            pair.verifier.local_drafters.add(name, heads[name])

    outcomes = restored.run(opens, use_draft=False, each_turn=disturb)
    assert_all_equal(outcomes, opens, plainly)
    names = {record.name for outcome in outcomes.values() for v in outcome.verdicts for record in v.drafters}
    assert names >= set(heads)


@pytest.mark.usefixtures("always_asked")
def test_heads_are_not_asked_where_speculation_is_suspended(
    restored: LocalPair, plainly: Plainly, options: dict[str, HeadOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take passes of their own, unlike drafters that look up."""
    num_asked: list[int] = []
    draft = SerialHead.draft
    monkeypatch.setattr(SerialHead, "draft", lambda head, asks: num_asked.append(len(asks)) or draft(head, asks))
    body = open_session(prompts()[0][:50], max_tokens=40, ignore_eos=True)
    expected = plainly(body)
    for gate in (Closed(), None):
        restored.reset(drafters=[options[RIGHT]])
        assert_equal(restored.run({"a": body}, use_draft=False, gate=gate)["a"], expected)
        assert bool(num_asked) == (gate is None)


@pytest.mark.usefixtures("always_asked")
def test_what_is_accepted_goes_on_being_accepted_when_the_prompt_was_in_the_cache(
    options: dict[str, HeadOptions], restored: LocalPair, plainly: Plainly
) -> None:
    body = open_session(prompts()[0][:50], max_tokens=40, ignore_eos=True, body={"cache_salt": b"twice"})
    first = check(restored, plainly, [options[RIGHT]], {"a": body}, use_draft=False)
    again = restored.run({"a": body}, use_draft=False)["a"]
    assert again.verdicts[0].num_cached_tokens > 0
    assert again.num_accepted > 0.7 * first > 7


@pytest.mark.parametrize("how", ["raises", "NaN", "a hidden state that is infinite"])
def test_a_head_that_fails_in_mid_stream_is_dropped_and_costs_nobody_a_token(
    how: str, options: dict[str, HeadOptions], restored: LocalPair, plainly: Plainly
) -> None:
    opens = {str(i): body_of({"prompt": i, "temperature": float(i % 2)}) for i in range(3)}
    for body in opens.values():
        plainly(body)
    restored.reset(drafters=[NgramOptions(), options[RIGHT]])
    head = restored.verifier.local_drafters._drafters["eagle"]
    assert isinstance(head, SerialHead)
    num_calls = 0
    plain_draft = head.draft

    def draft(asks: Sequence[HeadAsk]) -> list[Offer | None]:
        nonlocal num_calls
        num_calls += 1
        if num_calls >= 4:
            if how == "raises":
                raise RuntimeError("broken on purpose")
            for ask in asks:
                if ask.session.last is not None:
                    bad = torch.nan if how == "NaN" else torch.inf
                    ask.session.last = (ask.session.last[0], torch.full_like(ask.session.last[1], bad))
                for features in ask.session.pending:
                    features.states.fill_(torch.nan if how == "NaN" else torch.inf)
        return plain_draft(asks)

    head.draft = draft  # type: ignore[method-assign]
    outcomes = restored.run(opens, use_draft=False)
    assert_all_equal(outcomes, opens, plainly)
    assert restored.verifier.local_drafters.names == ["ngram"]
    assert num_calls == 4
    assert restored.target_built.engine.tap_ids == ()
    dropped = restored.target_registry.get_sample_value("specdec_target_drafters_dropped_total", {"drafter": "eagle"})
    assert dropped == 1


def test_without_heads_the_engine_hands_out_nothing(
    options: dict[str, HeadOptions], restored: LocalPair, tmp_path: Path
) -> None:
    restored.reset(drafters=[options["eagle3"], options["medusa"]])
    assert restored.target_built.engine.tap_ids == (-1, 1, 2, 3)
    restored.reset(drafters=[NgramOptions()])
    assert restored.target_built.engine.tap_ids == ()
