"""A device that computes steps late: whatever arrives meanwhile, tokens are those of plain decoding, and what sessions
are told is what they are told where steps are computed at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.scheduler import ScheduledItem
from specdec.target_service.pacing.pacing import Pacing
from specdec.v1 import common_pb2 as pb
from tests.support.engine.constrained import SCHEMAS, TEXTS, constrained
from tests.support.engine.constrained import plainly as plainly_constrained
from tests.support.engine.grammars import json_schema
from tests.support.engine.late_device import LateDevice, put_on_late_device, unhurried
from tests.support.engine.local_pair import LocalPair
from tests.support.engine.rejection import check_distribution
from tests.support.engine.worker_client import WorkerClient
from tests.unit.lossless.cases import CASES
from tests.unit.lossless.sessions import (
    Plainly,
    assert_all_equal,
    assert_equal,
    body_of,
    check_random_schedule,
    examples,
    salts,
)

REJECTION = pb.VERIFY_MODE_REJECTION
Late = tuple[LocalPair, LateDevice]


@pytest.fixture(scope="module")
def loaded_late() -> Late:
    pair = LocalPair()
    return pair, put_on_late_device(pair, 240)


@pytest.fixture(scope="module")
def tight_late() -> Late:
    """So few blocks and rows that sessions are preempted and prompts come in chunks."""
    tight = {"max_batch_tokens": 20, "max_batch_seqs": 3}
    pair = LocalPair(draft_options={"num_blocks": 10, **tight}, num_blocks=18, **tight)
    return pair, put_on_late_device(pair, 10)


@pytest.fixture
def late(loaded_late: Late) -> Late:
    return undisturbed(loaded_late)


def undisturbed(late: Late) -> Late:
    pair, device = late
    device.is_threaded, device.num_looks, device.meanwhile = False, lambda: 2, lambda: None
    pair.reset()
    return late


def disturb(late: Late, rng: random.Random, *, is_threaded: bool) -> None:
    """Steps take any time, and the draft works and sends while they are computed."""
    pair, device = late
    device.is_threaded = is_threaded
    device.num_looks = lambda: rng.randrange(12)

    def meanwhile() -> None:
        for _ in range(rng.randrange(4)):
            pair.draft._turn()
        pair._relay_proposals(None)

    device.meanwhile = meanwhile


@pytest.mark.parametrize("is_threaded", [False, True], ids=["when looked at", "on a thread"])
@given(seed=st.integers(0, 2**32), chosen=st.lists(st.integers(0, 99), min_size=1, max_size=6))
@examples
def test_random_schedules_change_no_token(
    loaded_late: Late, plainly: Plainly, is_threaded: bool, seed: int, chosen: list[int]
) -> None:
    pair, _ = undisturbed(loaded_late)
    disturb(loaded_late, random.Random(seed), is_threaded=is_threaded)
    check_random_schedule(pair, plainly, seed, chosen)


@given(seed=st.integers(0, 2**32), chosen=st.lists(st.integers(0, 99), min_size=2, max_size=6))
@settings(examples, max_examples=6)
def test_chunks_of_prompts_and_preemption_change_no_token(
    tight_late: Late, plainly: Plainly, seed: int, chosen: list[int]
) -> None:
    pair, device = undisturbed(tight_late)
    disturb(tight_late, random.Random(seed), is_threaded=False)
    check_random_schedule(pair, plainly, seed, chosen)
    assert device.num_padded > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_are_followed_to_the_same_tokens(temperature: float, late: Late, loaded_pair: LocalPair) -> None:
    bodies = {name: constrained(json_schema(SCHEMAS[name]), temperature=temperature) for name in list(SCHEMAS)[::3]}
    bodies |= {name: constrained(constraint, temperature=temperature) for name, constraint in TEXTS.items()}
    expected = plainly_constrained(loaded_pair, bodies)
    disturb(late, random.Random(5), is_threaded=False)
    outcomes = late[0].run(bodies)
    for name, outcome in outcomes.items():
        assert_equal(outcome, expected[name])
    assert sum(outcome.num_accepted for outcome in outcomes.values()) > 0


@pytest.mark.parametrize("own_draft", [False, True])
def test_forks_and_drafts_of_the_targets_own_change_no_token(own_draft: bool, late: Late, plainly: Plainly) -> None:
    case = {"prompt": 3, "temperature": 1.0, "num_logprobs": 2}
    salt = b"%d" % next(salts)
    opens = {str(i): body_of({**case, "choice": i}, cache_salt=salt) for i in range(3)}
    for name in "12":
        opens[name].fork_from = "0"
    pair, device = late
    expected = {name: plainly(body) for name, body in opens.items()}
    pair.reset(own_draft=own_draft)
    device.num_looks = lambda: 5
    for name, outcome in pair.run(opens).items():
        assert_equal(outcome, expected[name])


def test_in_rejection_mode_tokens_follow_the_target_exactly(late: Late) -> None:
    disturb(late, random.Random(1), is_threaded=False)
    check_distribution(late[0], REJECTION, 768)


# --- what sessions are told


class Script:
    """What arrives during each step: a function of the seed, the step's number and the committed lengths before it."""

    def __init__(self, client: WorkerClient, bodies: dict[str, pb.OpenSession], truth: dict[str, list[int]], seed: int):
        self.num_steps = 0
        self.num_proposals = 0
        self._client = client
        self._bodies = bodies
        self._truth = truth
        self._seed = seed

    def entries(self) -> list[tuple[str, dict[str, Any]]]:
        self.num_steps += 1
        rng = random.Random(f"{self._seed} {self.num_steps}")
        entries: list[tuple[str, dict[str, Any]]] = []
        for name, body in self._bodies.items():
            session = self._client.session(name)
            if session is None:
                continue
            length, kind = session.num_tokens, rng.random()
            if kind < 0.6:
                self.num_proposals += 1
                entries.append((name, {"proposal": self._proposal(name, body, length, rng)}))
            elif kind < 0.7:
                entries.append((name, {"proposal": self._bad_proposal(length, rng)}))
            if rng.random() < 0.3:
                entries.append((name, {"credit": pb.Credit(position=length + rng.randrange(6))}))
        rng.shuffle(entries)
        return entries

    def _proposal(self, name: str, body: pb.OpenSession, length: int, rng: random.Random) -> bytes:
        truth = self._truth[name]
        start = max(body.num_prompt_tokens, length - rng.randrange(3))
        tokens = [
            token if rng.random() < 0.85 else rng.randrange(4096) for token in truth[start : start + rng.randrange(12)]
        ]
        proposal = pb.Proposal(start_position=start, token_ids=tokens, is_complete=rng.random() < 0.3, draft_us=7)
        if body.verify_mode == REJECTION:
            proposal.draws_afresh = True
            for token in tokens:
                proposal.distributions.add(token_ids=sorted({token, 9}), probs=[0.5, 0.5] if token != 9 else [1.0])
        elif tokens and rng.random() < 0.5:
            proposal.parents.extend(range(-1, len(tokens) - 1))
            proposal.parents.append(rng.randrange(-1, len(tokens)))
            proposal.token_ids.append(rng.randrange(4096))
            proposal.scores = rng.randbytes(len(tokens) + 1)
        return proposal.SerializeToString()

    def _bad_proposal(self, length: int, rng: random.Random) -> bytes:
        bad = [
            pb.Proposal(start_position=length + 50, token_ids=[5]).SerializeToString(),
            pb.Proposal(start_position=length, token_ids=[5, 6], parents=[1, -1]).SerializeToString(),
            pb.Proposal(start_position=length + 50, token_ids=[1 << 20]).SerializeToString(),
            b"\xff\xff",
            b"\0" * (1 << 17),
        ]
        return rng.choice(bad)


def told(
    late: Late, bodies: dict[str, pb.OpenSession], truth: dict[str, list[int]], seed: int, *, is_late: bool
) -> tuple[list[tuple[str, str, bytes]], Script]:
    """All that sessions are told, but for times; where steps are not late all of the script comes behind its step."""
    pair, device = undisturbed(late)
    engine = pair.target_built.engine
    engine.launch_pass = device.launch if is_late else None
    client = WorkerClient(pair, "target")
    pair.verifier.steps.pacing = Pacing(0.0)
    pair.verifier.steps.pacing.clock.rows = unhurried()
    client.attach()
    salt = b"%d" % next(salts)
    for name, body in bodies.items():
        fresh = pb.OpenSession()
        fresh.CopyFrom(body)
        fresh.cache_salt, fresh.credit_position = salt, body.num_prompt_tokens + 3
        client.entry(name, open=fresh)
    script = Script(client, bodies, truth, seed)
    rng = random.Random(seed)
    arriving: list[tuple[str, dict[str, Any]]] = []
    begin = pair.verifier.steps.pass_begins

    def pass_begins(items: list[ScheduledItem]) -> None:
        begin(items)
        arriving.extend(script.entries())

    def arrive() -> None:
        for name, entry in arriving:
            client.entry(name, **entry)
        arriving.clear()

    pair.verifier.steps.pass_begins = pass_begins  # type: ignore[method-assign]
    device.meanwhile, device.num_looks = arrive, lambda: rng.randrange(10)
    for _ in range(2000):
        num_steps = script.num_steps
        client.turn()
        arrive()
        if not len(client.host.sessions):
            break
        if script.num_steps == num_steps:
            for session in client.host.sessions:
                client.entry(session.session_id, credit=pb.Credit(position=session.num_tokens + 2))
    assert not len(client.host.sessions)
    client.turn()
    client.check_nothing_held()
    engine.launch_pass = device.launch
    return [
        (result.session_id, kind, without_times(getattr(result, kind)))
        for result in client.results
        if (kind := str(result.WhichOneof("result"))) != "progress"
    ], script


def without_times(result: Any) -> bytes:
    if isinstance(result, pb.Verdict):
        result.step_us = result.hold_off_us = result.queue_us = result.prefill_us = 0
    encoded: bytes = result.SerializeToString(deterministic=True)
    return encoded


@pytest.mark.parametrize("seed", range(12))
def test_sessions_are_told_what_they_are_told_where_steps_are_computed_at_once(
    seed: int, loaded_late: Late, plainly: Plainly
) -> None:
    """Verdict for verdict, with what was accepted, wasted and refused, in both modes of verification."""
    speculates = {"max_draft_tokens": 8}
    bodies = {
        "greedy": body_of({"prompt": 0, "temperature": 0.0, "num_logprobs": 2}, **speculates),
        "sampled": body_of({"prompt": 1, "temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5}, **speculates),
        "rejection": body_of({"prompt": 2, "temperature": 1.0}, **speculates),
        "blocks": body_of({"prompt": 3, "temperature": 0.8}, **speculates),
        "constrained": constrained(json_schema(SCHEMAS["nested"]), temperature=1.0, body=speculates, max_tokens=28),
    }
    bodies["rejection"].verify_mode = bodies["blocks"].verify_mode = REJECTION
    bodies["blocks"].rejection_sample_method = pb.REJECTION_SAMPLE_METHOD_BLOCK
    truth = {name: [*body.token_ids, *plainly(body).token_ids] for name, body in bodies.items()}
    undisturbed(loaded_late)[0].run({"": bodies["constrained"]})  # compiles its constraint
    expected, _ = told(loaded_late, bodies, truth, seed, is_late=False)
    found, script = told(loaded_late, bodies, truth, seed, is_late=True)
    assert found == expected
    kinds = [kind for _, kind, _ in found]
    assert script.num_proposals > 10
    assert "proposal_rejected" in kinds
    assert kinds.count("verdict") > 20


def test_all_cases_of_the_table_at_once_give_their_tokens(late: Late, plainly: Plainly) -> None:
    pair, _ = late
    disturb(late, random.Random(2), is_threaded=False)
    opens = {str(i): body_of(case) for i, case in enumerate(CASES)}
    assert_all_equal(pair.run(opens), opens, plainly)
