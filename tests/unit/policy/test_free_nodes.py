"""Nodes that cost nothing but rows: verified while a draft is suspended, as long as the gate's account bears it."""

from __future__ import annotations

from specdec.target_service.policy.acceptance import OwnRecord, SourceRecord
from specdec.target_service.policy.gate import SpeculationGate
from specdec.target_service.policy.gate_state import GateState, Phase

PLAIN_S = 0.010


def decode(
    gate: SpeculationGate, state: GateState, now_s: float, *, step_s: float, num_tokens: int, free: bool
) -> None:
    gate.stepped(state, num_tokens - 1, free, now_s, num_nodes=8 if free else 0)
    gate.observe_turn([state], num_tokens=[num_tokens], turn_s=step_s, now_s=now_s, waiting=[state], are_free=[free])


def suspended_gate() -> tuple[SpeculationGate, GateState, float]:
    """A session that was seen to gain nothing, and plain steps that were measured."""
    gate, now_s = SpeculationGate(), 0.0
    state = gate.admit("greedy", now_s)
    for _ in range(200):
        now_s += PLAIN_S
        decode(gate, state, now_s, step_s=PLAIN_S, num_tokens=1, free=False)
    assert gate.clock.plain_s(1) is not None
    return gate, state, now_s


def test_a_session_whose_draft_is_suspended_may_have_them() -> None:
    gate, state, now_s = suspended_gate()
    state.enter(Phase.OFF, now_s)
    assert not gate.is_open(state)
    assert gate.allows_free_nodes(state)


def test_ones_that_lose_time_are_left_out_until_the_account_has_recovered_and_lose_a_bounded_share() -> None:
    gate, state, now_s = suspended_gate()
    spent_s = plain_s = 0.0
    num_free = 0
    for _ in range(4000):
        if state.phase is not Phase.OFF:
            state.enter(Phase.OFF, now_s)  # a draft that is gone: probes of it are not what is tried here
        free = gate.allows_free_nodes(state)
        step_s = 1.5 * PLAIN_S if free else PLAIN_S
        now_s += step_s
        num_free += free
        spent_s, plain_s = spent_s + step_s, plain_s + PLAIN_S
        decode(gate, state, now_s, step_s=step_s, num_tokens=1, free=free)
    assert 0 < num_free < 800
    assert spent_s < 1.04 * plain_s + 0.1


def test_ones_that_save_time_are_never_left_out_but_for_references() -> None:
    gate, state, now_s = suspended_gate()
    num_left_out = 0
    for _ in range(2000):
        if state.phase is not Phase.OFF:
            state.enter(Phase.OFF, now_s)
        free = gate.allows_free_nodes(state)
        num_left_out += not free
        now_s += PLAIN_S
        decode(gate, state, now_s, step_s=1.2 * PLAIN_S if free else PLAIN_S, num_tokens=4 if free else 1, free=free)
    assert num_left_out < 100


def test_what_a_session_has_seen_of_a_source_counts_more_the_more_it_is() -> None:
    everybody, own = SourceRecord(), OwnRecord()
    for _ in range(300):
        everybody.observe(0.9, 1, accepted=False, own=None)
    assert everybody.rate(0.9, 1, own) < 0.05
    rates = []
    for _ in range(30):
        everybody.observe(0.9, 1, accepted=True, own=own)
        rates.append(everybody.rate(0.9, 1, own))
    assert rates == sorted(rates)
    assert rates[-1] > 0.75
    assert everybody.rate(0.9, 1, OwnRecord()) < 0.2
    assert everybody.rate(0.9, 4, None) == 0.9  # nothing was seen at that depth: its own word
