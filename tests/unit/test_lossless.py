"""Whatever drafts, schedules, failures and neighbours do, a coupled session's tokens are those of plain decoding.

All on the shipped pair, in this process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.v1 import common_pb2 as pb
from tests.unit.local_pair import MODELS, UNLIMITED, LocalPair, Outcome, chain, open_session, prompts
from tests.unit.lossless_cases import CASES, FACTORS, pairwise_table

NUM_TOKENS = 28
PROMPT_LENGTHS = (33, 20, 47, 64)
_salts = itertools.count()

examples = settings(
    max_examples=8, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
many_examples = settings(examples, max_examples=300, derandomize=False)


@pytest.fixture(scope="module")
def loaded_pair() -> LocalPair:
    return LocalPair()


@pytest.fixture
def pair(loaded_pair: LocalPair) -> LocalPair:
    loaded_pair.reset()
    return loaded_pair


@pytest.fixture(scope="module")
def tight_pair() -> LocalPair:
    """So few blocks and rows that sessions are preempted and prompts come in chunks, at target and draft."""
    tight = {"num_blocks": 10, "max_batch_tokens": 20, "max_batch_seqs": 3}
    return LocalPair(draft_options=tight, **tight)


@pytest.fixture(scope="module")
def reference_model() -> PreTrainedModel:
    """The target as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()


def body_of(case: dict[str, Any], **body: Any) -> pb.OpenSession:
    """A session of the table."""
    case = {"max_tokens": NUM_TOKENS, "seed": 11, **case}
    index = case.pop("prompt")
    limit = case.pop("max_draft_tokens", None)
    if limit is not None:
        body = {"max_draft_tokens": limit, **body}
    if case.get("num_logprobs", 0) is None:
        del case["num_logprobs"]
    return open_session(prompts()[index][: PROMPT_LENGTHS[index % 4]], body=body, **case)


@pytest.fixture(scope="module")
def plainly(loaded_pair: LocalPair) -> Callable[[pb.OpenSession], Outcome]:
    """Decode a session alone, without a draft, and without anything from the prefix cache."""
    known: dict[bytes, Outcome] = {}

    def decode(body: pb.OpenSession) -> Outcome:
        alone = pb.OpenSession()
        alone.CopyFrom(body)
        alone.speculate = False
        alone.fork_from = ""
        alone.credit_position = UNLIMITED
        alone.ClearField("max_draft_tokens")
        alone.cache_salt = b""
        key = alone.SerializeToString(deterministic=True)
        if key not in known:
            alone.cache_salt = b"plain %d" % next(_salts)
            loaded_pair.reset()
            known[key] = loaded_pair.run({"alone": alone}, use_draft=False)["alone"]
            assert known[key].verdicts[0].num_cached_tokens == 0
            loaded_pair.reset()
        return known[key]

    return decode


Plainly = Callable[[pb.OpenSession], Outcome]


def assert_equal(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.error is None
    assert outcome.token_ids == expected.token_ids
    assert outcome.finish_reason == expected.finish_reason
    assert outcome.stop_token_id == expected.stop_token_id
    assert outcome.logprobs == expected.logprobs


def assert_all_equal(outcomes: dict[str, Outcome], opens: dict[str, pb.OpenSession], plainly: Plainly) -> None:
    for session_id, body in opens.items():
        assert_equal(outcomes[session_id], plainly(body))


# --- the table


def test_the_table_holds_every_pair_of_values() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        found = [(case[a], case[b]) for case in CASES]
        assert all(pair in found for pair in itertools.product(FACTORS[a], FACTORS[b])), (a, b)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"temperature={case['temperature']}")
def test_speculation_does_not_change_tokens_logprobs_or_the_end(
    case: dict[str, Any], pair: LocalPair, plainly: Plainly
) -> None:
    body = body_of(case)
    expected = plainly(body)

    outcome = pair.run({"a": body})["a"]

    assert_equal(outcome, expected)
    assert not outcome.rejected
    assert not outcome.draft_errors
    limit = case["max_draft_tokens"]
    assert all(sum(verdict.verified_by_depth) <= (8 if limit is None else limit) for verdict in outcome.verdicts)
    assert len(outcome.logprobs) == (0 if case["num_logprobs"] is None else len(outcome.token_ids))


def test_speculation_is_at_work_in_these_tests(pair: LocalPair, plainly: Plainly) -> None:
    opens = {str(i): body_of({"prompt": i, "temperature": t}) for i, t in enumerate((0.0, 0.0, 1.0, 1.0))}
    outcomes = pair.run(opens)
    assert_all_equal(outcomes, opens, plainly)
    assert all(outcome.num_verified > 0 for outcome in outcomes.values())
    assert sum(outcome.num_accepted for outcome in outcomes.values()) >= 10
    assert all(
        outcome.num_accepted == sum(origin == pb.ORIGIN_DRAFT for origin in outcome.origins)
        for outcome in outcomes.values()
    )


def test_origins_tell_how_each_token_came_to_be(pair: LocalPair, plainly: Plainly) -> None:
    body = body_of({"prompt": 0, "temperature": 0.0})
    outcome = pair.run({"a": body})["a"]
    plain = plainly(body)
    assert plain.origins == [pb.ORIGIN_PREFILL] + [pb.ORIGIN_DECODE] * (len(plain.token_ids) - 1)
    assert outcome.origins[0] == pb.ORIGIN_PREFILL
    for verdict in outcome.verdicts[1:]:
        *accepted, last = verdict.origins
        assert set(accepted) <= {pb.ORIGIN_DRAFT}
        if not verdict.verified_by_depth:
            assert last == pb.ORIGIN_DECODE
        elif last == pb.ORIGIN_BONUS:
            assert 0 < len(accepted) <= len(verdict.verified_by_depth)
        elif last == pb.ORIGIN_DRAFT:
            assert verdict.finish_reason
        else:
            assert last == pb.ORIGIN_RECOVERED


@pytest.mark.parametrize("first", range(0, len(CASES), 8))
def test_eight_sessions_at_once_do_not_disturb_each_other(first: int, pair: LocalPair, plainly: Plainly) -> None:
    opens = {str(i): body_of(case) for i, case in enumerate(CASES[first : first + 8])}
    assert_all_equal(pair.run(opens, rng=random.Random(first)), opens, plainly)


def test_the_cost_model_may_choose_what_to_verify(pair: LocalPair, plainly: Plainly) -> None:
    opens = {str(i): body_of(case) for i, case in enumerate(CASES[:8])}
    assert_all_equal(pair.run(opens, verify_all=False), opens, plainly)


# --- schedules


def check_random_schedule(pair: LocalPair, plainly: Plainly, seed: int, chosen: list[int]) -> None:
    pair.reset()
    opens = {str(i): body_of(CASES[index % len(CASES)]) for i, index in enumerate(chosen)}
    rng = random.Random(seed)
    outcomes = pair.run(opens, rng=rng, draft_turns=rng.choice((1, 3, 10)), verify_all=rng.random() < 0.8)
    assert_all_equal(outcomes, opens, plainly)


@given(seed=st.integers(0, 2**32), chosen=st.lists(st.integers(0, 99), min_size=1, max_size=8))
@examples
def test_late_repeated_and_lost_proposals_change_nothing(
    loaded_pair: LocalPair, plainly: Plainly, seed: int, chosen: list[int]
) -> None:
    check_random_schedule(loaded_pair, plainly, seed, chosen)


@pytest.mark.long
@given(seed=st.integers(0, 2**32), chosen=st.lists(st.integers(0, 99), min_size=1, max_size=8))
@many_examples
def test_many_more_schedules_change_nothing(
    loaded_pair: LocalPair, plainly: Plainly, seed: int, chosen: list[int]
) -> None:
    check_random_schedule(loaded_pair, plainly, seed, chosen)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
def test_other_tables_hold_too(seed: int, pair: LocalPair, plainly: Plainly) -> None:
    cases = pairwise_table(FACTORS, seed)
    for first in range(0, len(cases), 8):
        pair.reset()
        opens = {str(i): body_of({**case, "seed": seed}) for i, case in enumerate(cases[first : first + 8])}
        assert_all_equal(pair.run(opens, rng=random.Random(seed)), opens, plainly)


# --- the engine under pressure


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_and_chunked_prefill_change_nothing(
    temperature: float, tight_pair: LocalPair, plainly: Plainly
) -> None:
    tight_pair.reset()
    before = tight_pair.target_built.engine.stats().preemptions
    opens = {
        str(i): body_of({"prompt": i % 4, "temperature": temperature, "seed": i, "num_logprobs": 1}) for i in range(6)
    }
    assert_all_equal(tight_pair.run(opens, rng=random.Random(3)), opens, plainly)
    assert tight_pair.target_built.engine.stats().preemptions > before


@given(seed=st.integers(0, 2**32), chosen=st.lists(st.integers(0, 99), min_size=2, max_size=6))
@settings(examples, max_examples=4)
def test_random_schedules_under_preemption_change_nothing(
    tight_pair: LocalPair, plainly: Plainly, seed: int, chosen: list[int]
) -> None:
    check_random_schedule(tight_pair, plainly, seed, chosen)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_from_the_prefix_cache_gives_the_same_tokens(
    temperature: float, pair: LocalPair, plainly: Plainly
) -> None:
    body = body_of({"prompt": 3, "temperature": temperature}, cache_salt=b"%d" % next(_salts))
    first, second = (pair.run({"a": body})["a"] for _ in range(2))
    assert_equal(first, plainly(body))
    assert_equal(second, plainly(body))
    assert first.verdicts[0].num_cached_tokens == 0
    assert second.verdicts[0].num_cached_tokens >= 48


def test_another_salt_does_not_share_the_prefix_cache(pair: LocalPair) -> None:
    for salt in (b"one", b"two"):
        outcome = pair.run({"a": body_of({"prompt": 3, "max_tokens": 2}, cache_salt=salt)})["a"]
        assert outcome.verdicts[0].num_cached_tokens == 0


def forks(num_choices: int = 3, salt: bytes = b"") -> dict[str, pb.OpenSession]:
    """Choices of one request, all but the first forked from it."""
    case = {"prompt": 3, "temperature": 1.0, "num_logprobs": 2}
    return {
        str(i): body_of({**case, "choice": i}, cache_salt=salt, **({"fork_from": "0"} if i else {}))
        for i in range(num_choices)
    }


@pytest.mark.parametrize("seed", range(3))
def test_forks_give_what_their_choices_give_alone(seed: int, pair: LocalPair, plainly: Plainly) -> None:
    opens = forks(salt=b"%d" % next(_salts))
    before = pair.target_built.engine.stats()
    outcomes = pair.run(opens, rng=random.Random(seed))
    after = pair.target_built.engine.stats()
    assert_all_equal(outcomes, opens, plainly)
    assert len({tuple(outcome.token_ids) for outcome in outcomes.values()}) == 3
    assert all(outcome.origins[0] == pb.ORIGIN_PREFILL for outcome in outcomes.values())
    # One prefill served all three.
    assert after.prefix_query_tokens - before.prefix_query_tokens == len(opens["0"].token_ids)


def test_forks_survive_preemption(tight_pair: LocalPair, plainly: Plainly) -> None:
    tight_pair.reset()
    opens = forks(5)
    before = tight_pair.target_built.engine.stats().preemptions
    assert_all_equal(tight_pair.run(opens, rng=random.Random(0)), opens, plainly)
    assert tight_pair.target_built.engine.stats().preemptions > before


def test_forks_of_a_session_that_is_closed_in_prefill_start_on_their_own(
    tight_pair: LocalPair, plainly: Plainly
) -> None:
    tight_pair.reset()
    opens = forks(salt=b"%d" % next(_salts))

    def close_parent(pair: LocalPair) -> None:
        if "0" in pair.live and len(pair.target.sessions) == 3:
            pair.send_entry("0", close=pb.CloseSession(reason="cancelled"))
            pair.live.discard("0")

    outcomes = tight_pair.run(opens, use_draft=False, each_turn=close_parent)
    assert outcomes["0"].token_ids == []
    for session_id in ("1", "2"):
        assert_equal(outcomes[session_id], plainly(opens[session_id]))


# --- credit and reopening


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_session_never_runs_past_its_credit_and_loses_nothing_by_it(
    temperature: float, pair: LocalPair, plainly: Plainly
) -> None:
    rng = random.Random(5)
    opens = {}
    for i in range(4):
        body = body_of({"prompt": i, "temperature": temperature})
        body.credit_position = len(body.token_ids) + 1
        opens[str(i)] = body
    credit = {session_id: body.credit_position for session_id, body in opens.items()}

    def grant(pair: LocalPair) -> None:
        for session_id in sorted(pair.live):
            num_tokens = len(pair.tokens(session_id))
            assert num_tokens <= credit[session_id]
            if num_tokens == credit[session_id] and rng.random() < 0.5:
                credit[session_id] += rng.randrange(1, 6)
                position = credit[session_id]
                pair.send_entry(session_id, credit=pb.Credit(position=position, acknowledged_position=num_tokens))

    assert_all_equal(pair.run(opens, rng=rng, each_turn=grant), opens, plainly)


@given(seed=st.integers(0, 2**32), chosen=st.lists(st.integers(0, 99), min_size=1, max_size=4))
@examples
def test_reopening_with_the_committed_tokens_goes_on_equal(
    loaded_pair: LocalPair, plainly: Plainly, seed: int, chosen: list[int]
) -> None:
    loaded_pair.reset()
    rng = random.Random(seed)
    opens = {str(i): body_of(CASES[index % len(CASES)]) for i, index in enumerate(chosen)}

    def reopen(pair: LocalPair) -> None:
        for session_id in sorted(pair.live):
            if pair.num_output(session_id) and rng.random() < 0.1:
                pair.reopen(session_id)

    assert_all_equal(loaded_pair.run(opens, rng=rng, each_turn=reopen), opens, plainly)


def test_the_first_token_after_reopening_is_a_plain_decode(pair: LocalPair, plainly: Plainly) -> None:
    body = body_of({"prompt": 1, "temperature": 1.0})
    reopened_at: list[int] = []

    def reopen_once(pair: LocalPair) -> None:
        if not reopened_at and pair.num_output("a") >= 5:
            reopened_at.append(pair.num_output("a"))
            pair.reopen("a")

    outcome = pair.run({"a": body}, each_turn=reopen_once)["a"]
    assert_equal(outcome, plainly(body))
    assert outcome.origins[reopened_at[0]] == pb.ORIGIN_DECODE


# --- drafts that are no good


def random_proposals(rng: random.Random, token_ids: list[int]) -> Iterator[bytes]:
    """Wrong tokens, branches, huge, stale, early, duplicate and malformed proposals."""
    length = len(token_ids)
    for _ in range(rng.randrange(3)):
        num_nodes = rng.choice((0, 1, 3, 17, 64, 65, 200))
        proposal = pb.Proposal(
            start_position=max(0, length + rng.choice((0, 0, 0, -1, -2, -30, 1, 1000))),
            token_ids=[
                rng.choice((rng.randrange(4096), rng.randrange(8), 5000 * rng.randrange(2))) for _ in range(num_nodes)
            ],
            draft_us=rng.randrange(1000),
        )
        if num_nodes and rng.random() < 0.1:
            proposal.token_ids[-1] = 4096 + rng.randrange(1000)
        kind = rng.randrange(4)
        if kind:
            proposal.parents.extend(rng.randrange(-1, max(node, 1)) for node in range(num_nodes))
        if kind == 2:
            proposal.scores = rng.randbytes(num_nodes)
        if kind == 3 and rng.random() < 0.3:
            proposal.parents[:] = [rng.randrange(-3, num_nodes + 3) for _ in range(rng.randrange(num_nodes + 2))]
        encoded = proposal.SerializeToString()
        if rng.random() < 0.05:
            encoded = rng.randbytes(rng.randrange(40))
        yield encoded
        if rng.random() < 0.2:
            yield encoded


@given(seed=st.integers(0, 2**32))
@examples
def test_a_draft_that_proposes_garbage_changes_nothing(loaded_pair: LocalPair, plainly: Plainly, seed: int) -> None:
    loaded_pair.reset()
    rng = random.Random(seed)
    opens = {str(i): body_of({**rng.choice(CASES), "max_draft_tokens": 64}) for i in range(3)}
    outcomes = loaded_pair.run(
        opens, use_draft=rng.random() < 0.5, propose=lambda _, tokens: random_proposals(rng, tokens), rng=rng
    )
    assert_all_equal(outcomes, opens, plainly)


def test_bad_proposals_are_rejected_in_band_and_name_what_is_wrong(pair: LocalPair, plainly: Plainly) -> None:
    body = body_of({"prompt": 0, "temperature": 0.0})
    length = len(body.token_ids)
    bad = [
        pb.Proposal(start_position=length + 1000, token_ids=[1]),
        pb.Proposal(start_position=length, token_ids=[4096]),
        pb.Proposal(start_position=length, token_ids=[1, 2], parents=[1, 0]),
        pb.Proposal(start_position=length, token_ids=[1] * 65),
        pb.Proposal(start_position=length, token_ids=[1, 2], scores=b"1"),
    ]
    encoded = [proposal.SerializeToString() for proposal in bad] + [b"\xff"]
    each = iter([[one] for one in encoded])
    outcome = pair.run({"a": body}, use_draft=False, propose=lambda *_: next(each, []))["a"]
    assert_equal(outcome, plainly(body))
    messages = [rejected.status.message for rejected in outcome.rejected]
    fields = ("start_position", "token_ids[0]", "parents[0]", "token_ids", "scores", "proposal")
    assert len(messages) == len(fields)
    assert all(field in message for field, message in zip(fields, messages, strict=True)), messages
    assert all(rejected.expected_position >= length for rejected in outcome.rejected)


def tree_with_true_path(rng: random.Random, token_ids: list[int], rest: list[int]) -> bytes:
    """A branching tree in which the true continuation is out of place, among decoys before and after it."""
    behind = min(rng.choice((0, 0, 1, 3)), len(token_ids) - 1)
    start = len(token_ids) - behind
    true_path = [*token_ids[start:], *rest[: rng.randrange(1, 9)]]
    nodes: list[tuple[int, int]] = []
    above = -1
    for token in true_path:
        for _ in range(rng.randrange(3)):
            nodes.append((above, (token + rng.randrange(1, 4096)) % 4096))
            if rng.random() < 0.5:  # decoys have children of their own
                nodes.append((len(nodes) - 1, rng.randrange(4096)))
        nodes.append((above, token))
        above = len(nodes) - 1
    nodes = nodes[:64]
    parents, tokens = zip(*nodes, strict=True)
    return pb.Proposal(start_position=start, token_ids=tokens, parents=parents).SerializeToString()


@pytest.mark.parametrize(("num_sessions", "temperature"), [(1, 0.0), (1, 1.0), (8, 0.0), (8, 1.0)])
def test_the_true_path_of_a_branching_tree_is_accepted_and_its_kv_moved(
    num_sessions: int, temperature: float, pair: LocalPair, plainly: Plainly, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(num_sessions)
    opens = {
        str(i): body_of({"prompt": i % 4, "temperature": temperature, "seed": i, "max_draft_tokens": 64})
        for i in range(num_sessions)
    }
    truth = {session_id: [*body.token_ids, *plainly(body).token_ids] for session_id, body in opens.items()}
    runner = pair.target_built.engine.runner
    moves: list[int] = []
    copy_slots = runner.copy_slots

    def counting_copy(src: list[int], dst: list[int]) -> None:
        moves.append(len(src))
        copy_slots(src, dst)

    monkeypatch.setattr(runner, "copy_slots", counting_copy)

    def propose(session_id: str, tokens: list[int]) -> Iterable[bytes]:
        rest = truth[session_id][len(tokens) :]
        return [tree_with_true_path(rng, tokens, rest)] if rest else []

    outcomes = pair.run(opens, use_draft=False, propose=propose)
    assert_all_equal(outcomes, opens, plainly)
    num_tokens = sum(len(outcome.token_ids) for outcome in outcomes.values())
    num_accepted = sum(outcome.num_accepted for outcome in outcomes.values())
    assert num_accepted > num_tokens / 2
    assert not any(outcome.rejected for outcome in outcomes.values())
    assert moves


def test_branching_trees_under_preemption_change_nothing(tight_pair: LocalPair, plainly: Plainly) -> None:
    tight_pair.reset()
    rng = random.Random(8)
    opens = {str(i): body_of({"prompt": i, "temperature": 1.0, "max_draft_tokens": 64}) for i in range(4)}
    truth = {s: [*body.token_ids, *plainly(body).token_ids] for s, body in opens.items()}

    def propose(session_id: str, tokens: list[int]) -> Iterable[bytes]:
        rest = truth[session_id][len(tokens) :]
        return [tree_with_true_path(rng, tokens, rest)] if rest and rng.random() < 0.7 else []

    assert_all_equal(tight_pair.run(opens, propose=propose, rng=rng), opens, plainly)


def test_a_perfect_chain_takes_one_step_per_nine_tokens(pair: LocalPair, plainly: Plainly) -> None:
    body = body_of({"prompt": 2, "temperature": 1.0})
    expected = plainly(body)
    truth = [*body.token_ids, *expected.token_ids]
    outcome = pair.run(
        {"a": body}, use_draft=False, propose=lambda _, tokens: [chain(len(tokens), truth[len(tokens) :][:16])]
    )["a"]
    assert_equal(outcome, expected)
    # The first token comes with the prompt, then eight accepted and a bonus at a time.
    assert len(outcome.verdicts) <= 1 + -(-(len(expected.token_ids) - 1) // 9) + 1


# --- agreement with transformers


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


def test_a_session_that_fills_the_whole_cache_ends_by_length() -> None:
    small = LocalPair(num_blocks=4)
    body = open_session(prompts()[0][:50], max_tokens=100, ignore_eos=True)
    outcome = small.run({"a": body})["a"]
    assert outcome.finish_reason == pb.FINISH_REASON_LENGTH
    assert len(outcome.token_ids) == 4 * 16 - 50
