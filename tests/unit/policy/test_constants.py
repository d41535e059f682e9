"""Each constant of the target's policies has a case that fails where its value is clearly another one."""

from __future__ import annotations

import ast
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specdec.drafting.heads.session import Features, HeadSession
from specdec.drafting.role.growth import GrowthPolicy
from specdec.replica.worker.errors import SessionFailure
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.policy.acceptance import Acceptance, Counts, SourceRecord
from specdec.target_service.policy.budget import Account, WaitPurse
from specdec.target_service.policy.gate import SpeculationGate
from specdec.target_service.policy.gate_state import Gain, GateState, Phase
from specdec.target_service.policy.hold_off import DEPTHS, DraftLatency, HoldOffChoice
from specdec.target_service.policy.means import Mean
from specdec.target_service.policy.references import References, Settling
from specdec.target_service.policy.step_clock import StepClock
from specdec.target_service.policy.step_time import StepTimeModel
from specdec.target_service.policy.urgency import urgency
from specdec.target_service.proposals import head_runner
from specdec.target_service.proposals.deadline import Overdue
from specdec.target_service.proposals.head_runner import HeadRunner
from specdec.target_service.proposals.local_drafters import LocalDrafters
from specdec.target_service.proposals.own_draft import OwnDraft
from specdec.target_service.proposals.session_drafters import DrafterInSession
from specdec.target_service.proposals.swap import DrafterSwap
from specdec.target_service.session import SessionState
from specdec.target_service.turn_times import TurnTimes
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2

PLAIN_S = 0.01
ANY: Any = None


def learnt(score: float, depth: int) -> SourceRecord:
    """A source whose proposals of this score and depth are never accepted."""
    record = SourceRecord()
    for _ in range(1000):
        record.observe(score, depth, accepted=False, own=None)
    return record


def test_scores_and_depths_are_counted_apart_where_they_differ_much() -> None:
    assert learnt(0.9, 1).rate(0.7, 1, None) == pytest.approx(0.7), "num bands"
    assert learnt(0.9, 1).rate(0.95, 1, None) < 0.1, "num bands"
    assert learnt(0.9, 1).rate(0.9, 2, None) == pytest.approx(0.9), "depths"
    assert learnt(0.9, 2).rate(0.9, 4, None) == pytest.approx(0.9), "depths"
    assert learnt(0.9, 2).rate(0.9, 3, None) < 0.1, "depths"


def test_an_assumption_counts_as_much_as_a_few_observations() -> None:
    counts = Counts()
    for _ in range(4):
        counts.observe(accepted=False)
    assert 0.4 < counts.rate(1.0) < 0.6, "prior weight"
    assert 0.4 < Acceptance().depth_rate < 0.7, "prior rate"


def test_means_follow_a_change_within_twenty_observations_and_counts_within_two_hundred() -> None:
    mean, counts = Mean(), Counts()
    for _ in range(100):
        mean.observe(1.0)
    for _ in range(20):
        mean.observe(2.0)
    assert 1.5 < mean.value < 1.8, "weight"
    for accepted in [True] * 2000 + [False] * 200:
        counts.observe(accepted)
    assert 0.3 < counts.rate(0.5) < 0.45, "slow weight"


def test_one_observation_a_thousand_times_the_mean_says_little() -> None:
    mean = Mean()
    for value in [1.0] * 100 + [1000.0]:
        mean.observe(value)
    assert 1.1 < mean.value < 1.3, "most surprise"


# --- budget


def test_trial_waits_take_one_to_two_hundredths_of_the_time() -> None:
    purse, now_s, waited_s = WaitPurse(0.0), 0.0, 0.0
    while now_s < 60.0:
        now_s += 0.001
        if purse.grants(0.004, now_s):
            waited_s, now_s = waited_s + 0.004, now_s + 0.004
    assert 0.01 < waited_s / now_s < 0.02, "share"


def test_a_new_kind_may_lose_some_steps_and_savings_count_twice_that() -> None:
    poor, rich = Account(), Account()
    poor.enter(0.0, -0.03, 0.001)
    assert not poor.has_fallen(0.001, 0.0), "least"
    poor.enter(0.0, -0.03, 0.001)
    assert poor.has_fallen(0.001, 0.0), "least"
    rich.enter(0.0, 10.0, 0.001)
    rich.enter(0.0, -0.06, 0.001)
    assert rich.is_solvent, "savings"
    rich.enter(0.0, -0.06, 0.001)
    assert not rich.is_solvent, "savings"


def test_an_emptied_account_is_made_even_within_half_a_second() -> None:
    account = Account()
    account.enter(0.0, -1.0, 0.001)
    account.has_fallen(0.001, 10.0)
    assert not account.is_due(10.1), "first respite"
    assert account.is_due(10.5), "first respite"


# --- the gate


def stepping(gate: SpeculationGate, state: GateState, accepted: int, now_s: float) -> float:
    """A step of one session, which costs nothing more than a plain one; returns when it is over."""
    now_s += PLAIN_S
    gate.stepped(state, accepted, has_proposal=gate.is_open(state), now_s=now_s)
    gate.observe_turn([state], num_tokens=[1 + accepted], turn_s=PLAIN_S, now_s=now_s, waiting=[state])
    return now_s


def steps_until(gate: SpeculationGate, state: GateState, phase: Phase, accepted: list[int]) -> int:
    """Steps until a session enters a phase, where steps accept in turns what `accepted` says."""
    num_steps = 0
    while state.phase is not phase and num_steps < 1000:
        gate.stepped(state, accepted[num_steps % len(accepted)], has_proposal=True, now_s=0.0)
        num_steps += 1
    return num_steps


def test_a_probe_that_gains_a_little_ends_within_twenty_steps_and_one_that_gains_nothing_in_half_of_them() -> None:
    gate = SpeculationGate()
    little = gate.admit("little", 0.0)
    assert 8 <= steps_until(gate, little, Phase.OFF, [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]) <= 20, "trial steps"
    assert 4 <= steps_until(gate, gate.admit("vain", 0.0), Phase.OFF, [0]) <= 8, "trial steps"


def test_from_the_third_trial_on_a_kind_gets_shorter_ones() -> None:
    gate, lengths = SpeculationGate(), []
    state = gate.admit("vain", 0.0)
    for _ in range(3):
        if state.phase is Phase.OFF:
            state.enter(Phase.PROBE, 0.0)
        lengths.append(steps_until(gate, state, Phase.OFF, [0]))
    assert lengths[2] < lengths[0], "least trials"
    assert lengths[1] == lengths[0], "least trials"


@pytest.mark.parametrize(("accepted", "ends"), [([0] * 30 + [1], Phase.OFF), ([0] * 7 + [1], Phase.ON)])
def test_a_session_stops_where_it_gains_next_to_nothing(accepted: list[int], ends: Phase) -> None:
    gate = SpeculationGate()
    gate._gains["greedy"] = Gain(0.12)
    state = GateState("greedy", Phase.ON, 0.12, 0.0, is_measured=True, num_counted=1)
    for step in range(120):
        if state.phase is Phase.ON:
            gate.stepped(state, accepted[step % len(accepted)], has_proposal=True, now_s=step * PLAIN_S)
    assert state.phase is ends, "leave"


@pytest.mark.parametrize(("variance", "phase"), [(0.8, Phase.ON), (0.001, Phase.OFF)])
def test_chance_is_as_large_as_the_steps_of_the_kind_differ(variance: float, phase: Phase) -> None:
    """A session that gains nothing for a while may be unlucky where its kind gains in few steps, and much in these."""
    gate = SpeculationGate()
    gate._gains["greedy"] = Gain(0.2, variance)
    state = GateState("greedy", Phase.ON, 0.01, 0.0, is_measured=True, num_counted=1)
    gate.stepped(state, 0, has_proposal=True, now_s=0.0)
    assert state.phase is phase


def test_a_session_begins_where_it_gains_clearly_more_than_nothing() -> None:
    for gain, begins in ((0.1, False), (0.25, True)):
        gate = SpeculationGate()
        gate._gains["greedy"] = Gain()
        state = GateState("greedy", Phase.OFF, gain, 0.0, is_measured=True)
        gate._probe_due_s = 1e9
        gate._consider_probes([state], 0.0)
        assert (state.phase is Phase.PROBE) is begins, "worthwhile"


def test_a_session_that_gained_much_stops_after_some_steps_without_an_accepted_token() -> None:
    gate = SpeculationGate()
    state = GateState("greedy", Phase.ON, 2.0, 0.0, is_measured=True, num_counted=1)
    assert 6 <= steps_until(gate, state, Phase.OFF, [0]) <= 14, "odds"


def test_what_was_suspended_is_probed_again_in_less_than_a_second_but_not_at_once() -> None:
    gate = SpeculationGate()
    state = gate.admit("vain", 0.0)
    steps_until(gate, state, Phase.OFF, [0])
    stopped_s = now_s = state.since_s
    while state.phase is Phase.OFF and now_s < stopped_s + 10:
        now_s = stepping(gate, state, 0, now_s)
    assert 0.2 < now_s - stopped_s < 0.9, "probe every"


def test_of_a_group_of_which_nothing_is_known_a_few_sessions_are_probed_first() -> None:
    gate = SpeculationGate()
    phases = [gate.admit("new", 0.0).phase for _ in range(16)]
    assert 1 <= phases.count(Phase.PROBE) <= 3, "most first"


# --- clocks


def test_a_reference_has_some_steps_and_none_while_drafts_may_still_be_at_work() -> None:
    clock, references, settling = StepClock(), References(), Settling()
    for _ in range(2):
        clock.observe_turn(1, 0.0, PLAIN_S)
    assert clock.plain_s(1) is None, "least steps"
    for _ in range(3):
        clock.observe_turn(1, 0.0, PLAIN_S)
    assert clock.plain_s(1) == pytest.approx(PLAIN_S), "least steps"
    assert references.begins(clock, 1, 100.0)
    assert 5 <= references.num_left <= 12, "num steps"
    settling.begin(0.0)
    assert settling.covers(0.003), "settling"
    assert not settling.covers(0.009), "settling"


def test_before_a_step_was_seen_it_takes_milliseconds_and_rows_are_cheap() -> None:
    model = StepTimeModel()
    assert 0.005 < model.predict(1) < 0.02, "base"
    assert 1.2 < model.predict(9) / model.predict(1) < 2, "row"


def test_no_request_is_worth_more_than_a_score_of_others() -> None:
    assert 10 < urgency(1e-6, 1e6, 1) < 20, "most"
    assert urgency(1e-6, 1e6, 1) * urgency(4294.0, 0.0, 10_000_000) == pytest.approx(1.0)


def test_a_client_that_takes_nothing_for_long_is_no_session_that_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[Any]] = []
    now_s = 100.0
    monkeypatch.setattr("specdec.target_service.turn_times.time", SimpleNamespace(monotonic=lambda: now_s))
    sessions = [
        SimpleNamespace(
            times=SimpleNamespace(last_verdict_at_s=now_s - ago_s), gate=ago_s, seq=SimpleNamespace(is_ready=True)
        )
        for ago_s in (0.2, 5.0)
    ]  # fmt: skip
    expectations = SimpleNamespace(observe_rate=lambda *_: None)
    gate = SimpleNamespace(observe_turn=lambda *_, waiting, **__: told.append(waiting))
    pacing: Any = SimpleNamespace(observe_step=lambda *_: None, expectations=expectations, gate=gate, clock=StepClock())
    step: Any = SimpleNamespace(
        output=SimpleNamespace(num_tokens=1), turn_s=0.0, is_decode=True, num_committed=[1], gates=[],
        num_nodes=0, are_free=[],
    )  # fmt: skip
    times = TurnTimes(cast("Any", SimpleNamespace(take_prompt_s=lambda: 0.0)), cast("Any", sessions))
    times.ended(step)
    times.learn(pacing)
    assert told == [[0.2]], "starved"


# --- waits


def test_waits_are_for_a_few_nodes_and_every_other_depth_is_tried_now_and_then() -> None:
    choice, rates = HoldOffChoice(window=1), {0: 300.0}
    chosen = []
    for _ in range(800):
        chosen.append(depth := choice.choose(max_depth=8))
        choice.observe(depth, 10, 10 / rates.get(depth, 100.0))
    assert [depth for depth in DEPTHS if 0 < depth <= 8] == sorted({*chosen} - {0}) != [], "depths"
    assert 2 <= max(DEPTHS) <= 8, "depths"
    assert 1 / 24 < 1 - chosen.count(0) / len(chosen) < 1 / 10, "try every"


def test_a_draft_is_assumed_to_answer_in_milliseconds() -> None:
    assert 0.004 < DraftLatency().until_depth(1) < 0.02, "catch up"


def test_a_step_waits_somewhat_longer_than_the_draft_takes_on_average() -> None:
    pacing = Pacing(None)
    pacing.clock.rows = StepTimeModel(base_s=1.0)
    expected_s = pacing.draft_latency.until_depth(2)
    assert 1.2 < pacing._patience_s(2, 1, is_silent=False) / expected_s < 2.0, "patience"
    pacing.clock.rows = StepTimeModel(base_s=1e-4, row_s=1e-5)
    step_s = pacing.clock.rows.predict(1)
    assert step_s < pacing._patience_s(1, 1, is_silent=False) < 4 * step_s, "most steps per node"


def test_drafts_are_told_to_propose_somewhat_more_than_is_verified() -> None:
    pacing = Pacing(None)
    assert pacing.draft_credit(100) == 100, "nothing is known"
    for _ in range(100):
        pacing._mean_nodes.observe(8)
    assert 10 <= pacing.draft_credit(100) <= 16, "credit margin"


@pytest.mark.parametrize(("num_missed", "is_silent"), [(1, False), (2, True)])
def test_a_draft_is_silent_after_two_waits_in_vain(num_missed: int, is_silent: bool) -> None:
    assert waits_after(own=num_missed, all_sessions=0) is not is_silent, "max unanswered"


@pytest.mark.parametrize(("num_missed", "is_silent"), [(5, False), (12, True)])
def test_all_drafts_are_silent_after_some_waits_in_vain_of_any_session(num_missed: int, is_silent: bool) -> None:
    assert waits_after(own=0, all_sessions=num_missed) is not is_silent, "max vain"


def waits_after(own: int, all_sessions: int) -> bool:
    """Whether a session waits for its draft as its kind finds best, with an empty purse, after misses."""
    pacing = Pacing(None)
    pacing._purse = WaitPurse(0.0)
    pacing._num_vain = all_sessions
    choice = pacing._hold_off["greedy"]
    choice._current, choice._num_left = DEPTHS[-1], 10
    session: Any = SimpleNamespace(
        has_draft=True, max_nodes=8, gate=None, is_answered=False, tree=[], num_tokens=5, state=SessionState.DECIDED,
        params=SimpleNamespace(temperature=0.0), misses=SimpleNamespace(num_unanswered=own, episode=None),
        end=SimpleNamespace(max_depth=lambda _: 8),
    )  # fmt: skip
    return pacing._plan_hold_off(session, 1.0, 1) is not None


def test_no_draft_is_believed_to_take_an_hour_for_a_token() -> None:
    pacing = Pacing(None)
    tree = SimpleNamespace(lasting_depth=1, draft_us=0)
    session: Any = SimpleNamespace(tree=tree, num_tokens=5, hold_off=None, misses=SimpleNamespace(num_unanswered=0))
    pacing.observe_proposal(session, 0, pb.Proposal(draft_us=2**32 - 1, path_length=1), 0.0)
    assert 0.01 < pacing.draft_latency.node_s < 0.2, "most node"


# --- proposals


def test_a_useless_drafter_is_asked_again_within_a_hundred_steps() -> None:
    drafter = DrafterInSession("vain", ANY)
    for _ in range(200):
        drafter.judge(0.0, 0.5)
    assert 32 <= drafter.interval <= 100, "most interval"


def test_a_dear_useless_drafter_is_judged_after_some_calls() -> None:
    drafter = DrafterInSession("dear", ANY)
    while drafter.interval == 1:
        drafter.judge(0.0, 2.0)
    assert 3 <= drafter.num_calls <= 7, "most lost tokens"


def test_a_draft_leaves_out_what_is_clearly_less_likely_than_it_costs() -> None:
    own = OwnDraft(cast("Any", SimpleNamespace(round_s=0.004)), 8)
    pacing = Pacing(None)
    pacing.clock.rows.row_s, pacing.expectations.tokens_per_s = 0.0, 100.0
    assert 0.1 < own._appetite(pacing).min_path_score < 0.3, "lenience"


def test_a_refusal_of_drafters_says_what_fits_on_a_screen() -> None:
    request = target_pb2.SetDraftersRequest(drafters="x" * 100_000).SerializeToString()
    with pytest.raises(SessionFailure) as raised:
        DrafterSwap(LocalDrafters((), ANY), ANY, ANY, 1.0).call(1, request)
    assert 100 < len(str(raised.value)) < 2000, "most chars"


def armed_s(deadline: Any) -> float:
    """Seconds that code inside a deadline has."""
    with deadline:
        return signal.getitimer(signal.ITIMER_VIRTUAL)[0]


def test_calls_of_drafters_end_after_a_time_that_no_good_one_needs() -> None:
    local, heads = LocalDrafters((), ANY), HeadRunner(None)
    assert 0.1 < armed_s(local._deadline) < 1.0, "most call"
    assert 3.0 < armed_s(heads._deadline) < 30.0, "most call of heads"
    with pytest.raises(Overdue), local._deadline:
        while True:
            pass


@pytest.mark.parametrize(("num_bytes", "absorbs"), [(2**20, False), (2**23, True)])
def test_hidden_states_wait_for_a_head_in_a_few_megabytes(
    num_bytes: int, absorbs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    absorbed: list[Any] = []
    head = SimpleNamespace(forget=lambda *_: None, absorb=absorbed.extend)
    runner = HeadRunner(None)
    runner._heads, runner._columns = {"head": cast("Any", head)}, {"head": [0]}
    features = Features(0, torch.zeros(1, 1, num_bytes // 4), [1])
    session = SimpleNamespace(seq=None, session_id="s")
    share = SimpleNamespace(session=session, features=lambda _: features)
    monkeypatch.setattr(head_runner, "computed", lambda *_: [share])
    parts = [DrafterInSession("head", cast("Any", HeadSession()))]
    runner.feed(cast("Any", SimpleNamespace(items=[])), [], {}, lambda _: parts)
    assert bool(absorbed) is absorbs, "most pending bytes"


def test_trees_grow_where_a_path_is_likely_enough_and_are_sent_some_steps_at_a_time() -> None:
    growth = GrowthPolicy(max_ahead_tokens=8, max_nodes=32, max_heads=2)
    assert not growth.grows(1, 0.01, 1), "min path score"
    assert growth.grows(1, 0.03, 1), "min path score"
    assert growth.pick_branches([0.03, 0.06], (), [False, False], 2) == [1], "min branch score"
    assert not growth.is_worth_sending(1), "min new steps"
    assert growth.is_worth_sending(3), "min new steps"


# --- their number

ROOMS = ("target_service/policy", "target_service/pacing", "target_service/proposals")
FILES = ("target_service/turn_times.py", "specdec/drafting/role/growth.py")
MOST = 44


def constants_of(path: Path) -> list[str]:
    """Names at the top of a module that stand for numbers, and fields with a number other than 0 and 1 by default."""
    names: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and numbers_in(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names += [ast.unparse(name) for name in getattr(target, "elts", [target])]
        elif isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and each.value is not None]
            names += [f"{node.name}.{ast.unparse(e.target)}" for e in fields if numbers_in(e.value) - {0, 1}]
    return names


def numbers_in(tree: ast.AST | None) -> set[float]:
    constants = [node.value for node in ast.walk(tree or ast.Module([], [])) if isinstance(node, ast.Constant)]
    return {value for value in constants if isinstance(value, int | float) and not isinstance(value, bool)}


def test_policies_have_no_more_constants_than_this_file_has_cases_for() -> None:
    """Before one more is added: does a mechanism need it that the model world would miss?"""
    root = Path(__file__).parents[3]
    paths = [path for room in ROOMS for path in sorted((root / room).glob("*.py"))] + [root / file for file in FILES]
    names = [f"{path.stem}.{name}" for path in paths for name in constants_of(path)]
    assert len(names) <= MOST, names
