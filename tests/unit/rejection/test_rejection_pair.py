"""Rejection verification on the shipped pair: the output follows the target's distribution, whatever the draft's is.

The distribution tests compare the first three tokens of many sessions with exact probabilities by Pearson's
chi-square. Their false-alarm rate is 1e-6, and seeds and schedules are fixed, so they are the same on every run of one
machine.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdec.config.drafter_options import (
    LayerSkipOptions,
    NgramOptions,
    PredictionOptions,
    SuffixOptions,
)
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import RejectionMethod
from tests.support.engine.local_pair import MODELS, LocalPair, chain, open_session, prompts
from tests.support.engine.rejection import (
    FALSE_ALARM_RATE,
    HOLD_MS,
    REJECTION,
    Banned,
    check_distribution,
    chi_square_p_value,
    exact_distribution,
    rejection_session,
)
from tests.support.heads.fitted import right_eagle

BLOCK = pb.REJECTION_SAMPLE_METHOD_BLOCK


@pytest.fixture(scope="module")
def loaded_twins() -> LocalPair:
    """Draft and target are one model."""
    return LocalPair(draft=str(MODELS / "target"))


@pytest.fixture
def twins(loaded_twins: LocalPair) -> LocalPair:
    loaded_twins.reset()
    return loaded_twins


def test_sessions_end_after_their_tokens_with_some_accepted_and_some_recovered(pair: LocalPair) -> None:
    opens = {str(i): rejection_session(prompts()[i][:40], seed=i) for i in range(6)}
    outcomes = pair.run(opens, hold_off_ms=HOLD_MS)
    assert all(len(outcome.token_ids) == 24 for outcome in outcomes.values())
    assert all(outcome.finish_reason == pb.FINISH_REASON_LENGTH for outcome in outcomes.values())
    origins = Counter(origin for outcome in outcomes.values() for origin in outcome.origins)
    assert origins[pb.ORIGIN_DRAFT] > 10
    assert origins[pb.ORIGIN_RECOVERED] > 10
    # Only the last token may come alone: nothing could follow a node.
    assert all(pb.ORIGIN_DECODE not in outcome.origins[:-1] for outcome in outcomes.values())


@pytest.mark.parametrize("top_k", [1, 4, 64])
def test_a_draft_that_is_the_target_is_accepted_always(top_k: int, twins: LocalPair) -> None:
    opens = {str(i): rejection_session(prompts()[i][:40], seed=i, top_k=top_k) for i in range(4)}
    outcomes = twins.run(opens, hold_off_ms=HOLD_MS)
    for outcome in outcomes.values():
        assert outcome.num_verified > 0
        assert outcome.num_accepted == outcome.num_verified
        assert pb.ORIGIN_RECOVERED not in outcome.origins


def test_a_truncated_draft_that_is_the_target_is_accepted_mostly(twins: LocalPair) -> None:
    opens = {str(i): rejection_session(prompts()[i][:40], seed=i) for i in range(4)}
    outcomes = twins.run(opens, hold_off_ms=HOLD_MS)
    num_verified = sum(outcome.num_verified for outcome in outcomes.values())
    assert sum(outcome.num_accepted for outcome in outcomes.values()) > 0.8 * num_verified


def test_greedy_sessions_give_the_tokens_of_plain_decoding(pair: LocalPair) -> None:
    opens = {str(i): rejection_session(prompts()[i][:40], temperature=0.0) for i in range(4)}
    plain = {session_id: outcome.token_ids for session_id, outcome in pair.run(opens, use_draft=False).items()}
    pair.reset()
    outcomes = pair.run(opens, hold_off_ms=HOLD_MS)
    assert {session_id: outcome.token_ids for session_id, outcome in outcomes.items()} == plain
    assert sum(outcome.num_accepted for outcome in outcomes.values()) > 0


def test_random_schedules_and_neighbours_in_coupled_mode_leave_sessions_alive(pair: LocalPair) -> None:
    opens = {str(i): rejection_session(prompts()[i % 4][:40], seed=i) for i in range(4)}
    opens |= {f"coupled{i}": open_session(prompts()[i][:40], temperature=1.0) for i in range(2)}
    plain = pair.run({s: body for s, body in opens.items() if s.startswith("coupled")}, use_draft=False)
    pair.reset()
    outcomes = pair.run(opens, rng=random.Random(4))
    assert all(outcome.error is None for outcome in outcomes.values())
    assert all(outcomes[session_id].token_ids == outcome.token_ids for session_id, outcome in plain.items())
    assert all(len(outcomes[str(i)].token_ids) == 24 for i in range(4))


def bad_proposals(start: int) -> list[tuple[str, bytes]]:
    """What a target must refuse in rejection mode, and the field that it must name."""
    good = pb.SparseDistribution(token_ids=[5, 6], probs=[0.5, 0.5])
    cases: list[tuple[str, pb.Proposal]] = [
        ("distributions", pb.Proposal(start_position=start, token_ids=[5])),
        ("parents", pb.Proposal(start_position=start, token_ids=[5, 6], parents=[-1, -1], distributions=[good] * 2)),
    ]
    for bad in (
        pb.SparseDistribution(token_ids=[6], probs=[1.0]),  # its own token is not in it
        pb.SparseDistribution(token_ids=[5, 6], probs=[1.0]),
        pb.SparseDistribution(token_ids=[5, 5], probs=[0.5, 0.5]),
        pb.SparseDistribution(token_ids=[5, 9999], probs=[0.5, 0.5]),
        pb.SparseDistribution(token_ids=[5, 6], probs=[0.0, 1.0]),
        pb.SparseDistribution(token_ids=[5, 6], probs=[float("nan"), 1.0]),
        pb.SparseDistribution(),
    ):
        cases.append(
            (
                "distributions[1]",
                pb.Proposal(start_position=start, token_ids=[5, 5], distributions=[good, bad]),
            )
        )
    return [(field, proposal.SerializeToString()) for field, proposal in cases]


def test_proposals_without_sound_distributions_are_rejected_in_band_and_the_session_lives(pair: LocalPair) -> None:
    body = rejection_session(prompts()[0][:40])
    cases = bad_proposals(40)
    each = iter([[encoded] for _, encoded in cases])
    outcome = pair.run({"a": body}, use_draft=False, propose=lambda *_: next(each, []))["a"]
    assert len(outcome.token_ids) == 24
    assert outcome.error is None
    messages = [rejected.status.message for rejected in outcome.rejected]
    assert len(messages) == len(cases)
    assert all(f"proposal.{field}:" in message for (field, _), message in zip(cases, messages, strict=True)), messages


def test_a_coupled_session_takes_proposals_without_distributions(pair: LocalPair) -> None:
    body = open_session(prompts()[0][:40], temperature=1.0, max_tokens=8)
    plain = pair.run({"a": body}, use_draft=False)["a"].token_ids
    pair.reset()
    truth = [*body.token_ids, *plain]
    outcome = pair.run({"a": body}, use_draft=False, propose=lambda _, t: [chain(len(t), truth[len(t) :])])["a"]
    assert outcome.token_ids == plain
    assert outcome.num_accepted > 0


# --- the distribution


@pytest.mark.smoke
@pytest.mark.parametrize("mode", [REJECTION, pb.VERIFY_MODE_COUPLED])
def test_first_tokens_follow_the_target_exactly(mode: pb.VerifyMode.ValueType, pair: LocalPair) -> None:
    check_distribution(pair, mode, 768)


@pytest.mark.parametrize("own_draft", [False, True])
def test_first_tokens_follow_the_target_exactly_when_chains_are_decided_on_as_blocks(
    own_draft: bool, pair: LocalPair
) -> None:
    check_distribution(pair, REJECTION, 768, own_draft=own_draft, method=BLOCK)


def test_point_masses_are_decided_on_as_blocks_too(pair: LocalPair) -> None:
    likely = max(exact_distribution(prompts()[1][:17], 3).items(), key=lambda item: item[1])[0]
    drafters = [PredictionOptions(), SuffixOptions(), NgramOptions(prompt_lookup_min=1)]
    check_distribution(pair, REJECTION, 768, drafters=drafters, use_draft=False, prediction=likely, method=BLOCK)


@pytest.mark.parametrize("draws_afresh", [False, True])
def test_a_chain_is_decided_on_token_by_token_where_its_draft_repeats_draws(
    draws_afresh: bool, pair: LocalPair
) -> None:
    """Drafts of the release before do: a position that they draft again has the same random number."""
    body = rejection_session(prompts()[0][:40])
    body.rejection_sample_method = BLOCK
    methods: set[RejectionMethod] = set()

    def propose(_: str, tokens: list[int]) -> list[bytes]:
        if len(tokens) > 42:
            methods.update(session.rejection_method for session in pair.target_host.sessions)
        sparse = pb.SparseDistribution(token_ids=[5, 6], probs=[0.5, 0.5])
        proposal = pb.Proposal(
            start_position=len(tokens), token_ids=[5, 5], distributions=[sparse] * 2, draws_afresh=draws_afresh
        )
        return [proposal.SerializeToString()]

    outcome = pair.run({"a": body}, use_draft=False, propose=propose)["a"]
    assert outcome.error is None
    assert methods == {RejectionMethod.BLOCK if draws_afresh else RejectionMethod.STANDARD}


@pytest.mark.long
@pytest.mark.parametrize("mode", [REJECTION, pb.VERIFY_MODE_COUPLED])
def test_first_tokens_follow_the_target_exactly_over_many_seeds(mode: pb.VerifyMode.ValueType, pair: LocalPair) -> None:
    check_distribution(pair, mode, 20_000)


@pytest.mark.parametrize("use_draft", [False, True])
def test_point_masses_of_the_targets_own_drafters_leave_the_distribution(use_draft: bool, pair: LocalPair) -> None:
    likely = max(exact_distribution(prompts()[1][:17], 3).items(), key=lambda item: item[1])[0]
    drafters = [PredictionOptions(), SuffixOptions(), NgramOptions(prompt_lookup_min=1)]
    check_distribution(pair, REJECTION, 768, drafters=drafters, use_draft=use_draft, prediction=likely)
    assert pair.verifier.local_drafters.names == ["prediction", "suffix", "ngram"]


ALLOWED = [token for token in range(2, 1200) if token % 3]


def banned_words() -> list[tuple[int, ...]]:
    """The likeliest outputs of one and of two tokens, and one of three: each takes much of the distribution away."""
    single = max(exact_distribution(prompts()[1][:17], 1).items(), key=lambda item: item[1])[0]
    pair = max(exact_distribution(prompts()[1][:17], 2, lambda output: single).items(), key=lambda item: item[1])[0]
    triple = sorted(exact_distribution(prompts()[1][:17], 3, lambda output: single).items(), key=lambda item: item[1])
    return [single, pair, next(ids for ids, _ in reversed(triple) if ids[:2] != pair)]


def restricted(kind: str) -> tuple[dict[str, Any], Banned]:
    """Sampling parameters, and what they rule out behind an output."""
    if kind == "allowed_token_ids":
        ruled_out = sorted(set(range(4096)) - set(ALLOWED))
        return {"allowed_token_ids": ALLOWED}, lambda output: ruled_out
    words = banned_words()

    def banned(output: tuple[int, ...]) -> list[int]:
        return [word[-1] for word in words if len(word) == 1 or output[-len(word) + 1 :] == word[:-1]]

    return {"bad_words": [{"token_ids": word} for word in words]}, banned


@pytest.mark.parametrize("kind", ["allowed_token_ids", "bad_words"])
def test_what_restrictions_leave_follows_the_target_exactly(kind: str, pair: LocalPair) -> None:
    sampling, banned = restricted(kind)
    exact = exact_distribution(prompts()[1][:17], 3)
    assert sum(exact[ids] for ids in exact if any(ids[at] in banned(ids[:at]) for at in range(3))) > 0.3
    check_distribution(pair, REJECTION, 768, banned=banned, **sampling)


@pytest.mark.parametrize("kind", ["allowed_token_ids", "bad_words"])
def test_restricted_greedy_sessions_give_the_tokens_of_plain_decoding(kind: str, pair: LocalPair) -> None:
    sampling, _ = restricted(kind)
    opens = {str(i): rejection_session(prompts()[i][:40], temperature=0.0, **sampling) for i in range(4)}
    plain = {session_id: outcome.token_ids for session_id, outcome in pair.run(opens, use_draft=False).items()}
    pair.reset()
    outcomes = pair.run(opens, hold_off_ms=HOLD_MS)
    assert {session_id: outcome.token_ids for session_id, outcome in outcomes.items()} == plain
    assert sum(outcome.num_accepted for outcome in outcomes.values()) > 0
    if kind == "allowed_token_ids":
        assert {token for outcome in outcomes.values() for token in outcome.token_ids} <= set(ALLOWED)


def test_point_masses_of_a_head_leave_the_distribution(pair: LocalPair, tmp_path: Path) -> None:
    head = right_eagle(pair, tmp_path)
    check_distribution(pair, REJECTION, 768, drafters=[head], use_draft=False, least_share=1 / 10)
    assert pair.verifier.local_drafters.names == ["eagle"]


def test_point_masses_of_the_targets_own_layers_leave_the_distribution(pair: LocalPair) -> None:
    chosen = LayerSkipOptions(skip_attention_layers=(9,), skip_mlp_layers=(1, 2, 4, 5, 6))
    check_distribution(pair, REJECTION, 768, drafters=[chosen], use_draft=False)
    assert pair.verifier.local_drafters.names == ["layer_skip"]


def test_the_distribution_test_notices_the_drafts_distribution(pair: LocalPair) -> None:
    """The same test fails for samples of a distribution that is off by a tenth."""
    exact = exact_distribution(prompts()[1][:17], 3)
    skewed = {key: probability * (1.3 if key[1] % 2 else 0.7) for key, probability in exact.items()}
    rng = random.Random(1)
    counts = Counter(rng.choices(list(skewed), list(skewed.values()), k=768))
    assert chi_square_p_value(counts, exact) < FALSE_ALARM_RATE
