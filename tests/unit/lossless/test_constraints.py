"""Constraints: every output is what was asked for, and with speculation it is what it is without."""

from __future__ import annotations

import json
import random
import re

import pytest
from google.rpc import code_pb2

from specdec.v1 import common_pb2 as pb
from tests.support.engine.constrained import SCHEMAS, TEXTS, check_all, check_schema, constrained, plainly, text_of
from tests.support.engine.grammars import json_schema
from tests.support.engine.local_pair import LocalPair
from tests.support.engine.outcomes import Outcome
from tests.unit.lossless.sessions import assert_equal

BOS = 0

REJECTION = pb.VERIFY_MODE_REJECTION


def assert_all_alike(
    pair: LocalPair, bodies: dict[str, pb.OpenSession], *, own_draft: bool = False
) -> dict[str, Outcome]:
    expected = plainly(pair, bodies)
    pair.reset(own_draft=own_draft)
    found = pair.run(bodies, rng=None if own_draft else random.Random(3))
    for session_id, outcome in found.items():
        assert_equal(outcome, expected[session_id])
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_every_schema_is_obeyed_and_speculation_changes_nothing(temperature: float, pair: LocalPair) -> None:
    assert len(SCHEMAS) >= 30
    bodies = {
        name: constrained(json_schema(schema), temperature=temperature, seed=index)
        for index, (name, schema) in enumerate(SCHEMAS.items())
    }
    check_all(assert_all_alike(pair, bodies))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_a_draft_of_its_own_the_target_gives_the_same(temperature: float, pair: LocalPair) -> None:
    bodies = {name: constrained(json_schema(schema), temperature=temperature) for name, schema in SCHEMAS.items()}
    bodies |= {name: constrained(constraint, temperature=temperature) for name, constraint in TEXTS.items()}
    found = assert_all_alike(pair, bodies, own_draft=True)
    assert sum(outcome.num_accepted for outcome in found.values()) > 0


def test_in_rejection_mode_every_schema_is_obeyed(pair: LocalPair) -> None:
    bodies = {
        name: constrained(json_schema(schema), temperature=1.0, verify_mode=REJECTION)
        for name, schema in SCHEMAS.items()
    }
    outcomes = pair.run(bodies)
    check_all(outcomes)
    assert sum(outcome.num_accepted for outcome in outcomes.values()) > 100


@pytest.mark.parametrize("mode", [pb.VERIFY_MODE_COUPLED, REJECTION])
def test_regular_expressions_choices_and_grammars_are_obeyed(mode: pb.VerifyMode.ValueType, pair: LocalPair) -> None:
    bodies = {name: constrained(each, temperature=1.0, verify_mode=mode) for name, each in TEXTS.items()}
    outcomes = pair.run(bodies) if mode == REJECTION else assert_all_alike(pair, bodies)
    assert text_of(outcomes["one"]) == "the only answer there is"
    assert text_of(outcomes["one of several"]) in ("positive", "negative", "neutral")
    assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3}){1,3}", text_of(outcomes["sum"]))
    assert re.fullmatch(r"(- [a-z ]{3,8}\n){1,2}", text_of(outcomes["list"]))
    for name in ("telephone", "words", "either way"):
        assert re.fullmatch(TEXTS[name].regex, text_of(outcomes[name])), name
    assert all(outcome.finish_reason == pb.FINISH_REASON_STOP for outcome in outcomes.values())


def tags(triggers: list[str], **flags: bool) -> pb.Constraint:
    """Free text, but behind each trigger a boolean in angle brackets."""
    content = {"type": "json_schema", "json_schema": SCHEMAS["boolean"]}
    each = [{"begin": f"{trigger} <", "content": content, "end": ">"} for trigger in triggers]
    format = {"type": "triggered_tags", "triggers": triggers, "tags": each, **flags}
    return pb.Constraint(structural_tag=json.dumps({"format": format}))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("own_draft", [False, True])
def test_text_is_free_but_behind_the_triggers_of_structural_tags(
    temperature: float, own_draft: bool, pair: LocalPair
) -> None:
    triggers = ["return", "if", "):"]
    bodies = {
        str(seed): constrained(tags(triggers), prompt=seed, temperature=temperature, seed=seed) for seed in range(4)
    }
    bodies["one"] = constrained(tags(triggers, at_least_one=True, stop_after_first=True), temperature=temperature)
    bodies["free"] = constrained(tags(["never in a program\n\n\n\n"]), temperature=temperature)
    found = assert_all_alike(pair, bodies, own_draft=own_draft)
    num_tags = 0
    for outcome in found.values():
        text = text_of(outcome)
        behind = [text[match.end() :] for match in re.finditer("|".join(map(re.escape, triggers)), text)]
        wanted = (" <true>", " <false>")
        assert outcome is found["free"] or all(
            rest.startswith(wanted) or any(each.startswith(rest) for each in wanted) for rest in behind
        )
        num_tags += sum(rest.startswith(wanted) for rest in behind)
    assert num_tags > 3
    assert text_of(found["one"]).endswith(">")
    assert found["one"].finish_reason == pb.FINISH_REASON_STOP
    free = constrained(pb.Constraint(), temperature=temperature)
    free.sampling.ClearField("constraint")
    assert plainly(pair, {"free": free})["free"].token_ids == found["free"].token_ids


def test_what_is_forced_is_proposed_without_a_draft(pair: LocalPair) -> None:
    body = constrained(TEXTS["one"])
    outcome = pair.run({"a": body}, use_draft=False)["a"]
    assert text_of(outcome) == "the only answer there is"
    assert pb.ORIGIN_FORCED in outcome.origins
    assert len(outcome.verdicts) <= 3
    alone = plainly(pair, {"a": body})["a"]
    assert alone.token_ids == outcome.token_ids
    assert pb.ORIGIN_FORCED not in alone.origins


def test_sessions_with_and_without_constraints_decode_side_by_side(pair: LocalPair) -> None:
    bodies = {
        "json": constrained(json_schema(SCHEMAS["nested"]), temperature=1.0),
        "free": constrained(pb.Constraint(), temperature=1.0, max_tokens=30),
        "text": constrained(TEXTS["words"], temperature=0.7),
    }
    bodies["free"].sampling.ClearField("constraint")
    assert_all_alike(pair, bodies)


def test_choices_of_one_request_share_the_prompt_and_each_obeys(pair: LocalPair) -> None:
    schema = SCHEMAS["record"]
    bodies = {
        str(choice): constrained(
            json_schema(schema),
            temperature=1.0,
            choice=choice,
            body={"fork_from": "0" if choice else "", "cache_salt": b"forks"},
        )
        for choice in range(4)
    }
    outcomes = assert_all_alike(pair, bodies)
    for outcome in outcomes.values():
        check_schema(outcome, schema)
    assert len({text_of(outcome) for outcome in outcomes.values()}) > 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_tokens": 100},
        {"ignore_eos": True},
        {"logit_bias": {93: 3.0, 200: -50.0, 4: 20.0}},
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {"num_logprobs": 5, "top_k": 2},
        {"max_tokens": 7},
        {"max_draft_tokens": 1},
    ],
    ids=lambda sampling: "-".join(sampling),
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_parameters_choose_among_what_is_allowed(
    sampling: dict[str, object], temperature: float, pair: LocalPair
) -> None:
    schema = SCHEMAS["further properties"]
    sampling = dict(sampling)
    limit = sampling.pop("max_draft_tokens", None)
    body = {} if limit is None else {"max_draft_tokens": limit}
    bodies = {"a": constrained(json_schema(schema), temperature=temperature, body=body, **sampling)}
    outcome = assert_all_alike(pair, bodies)["a"]
    if "max_tokens" in sampling:
        assert outcome.finish_reason == pb.FINISH_REASON_LENGTH
        assert len(outcome.token_ids) == 7
    else:
        check_schema(outcome, schema)


def test_log_probabilities_are_of_the_allowed_tokens_alone(pair: LocalPair) -> None:
    outcome = pair.run({"a": constrained(TEXTS["one of several"], temperature=1.0, num_logprobs=8)})["a"]
    entries = [entry for verdict in outcome.verdicts for entry in verdict.logprobs]
    assert len(entries) == len(outcome.token_ids)
    assert entries[-1].logprob == 0.0
    assert [top.token_id for top in entries[-1].top] == [1]
    assert all(top.logprob > -1e30 for entry in entries for top in entry.top)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_token_inside_a_draft_ends_the_choice_there(temperature: float, pair: LocalPair) -> None:
    body = constrained(json_schema(SCHEMAS["long names"]), temperature=temperature)
    free = plainly(pair, {"a": body})["a"]
    stop = free.token_ids[5]
    body.sampling.stop_token_ids.append(stop)
    outcome = assert_all_alike(pair, {"a": body})["a"]
    assert outcome.stop_token_id == stop
    assert outcome.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_and_length_at_every_place_of_an_output_fall_inside_drafts(temperature: float, pair: LocalPair) -> None:
    body = constrained(json_schema(SCHEMAS["long names"]), temperature=temperature)
    free = plainly(pair, {"a": body})["a"].token_ids
    bodies: dict[str, pb.OpenSession] = {}
    for at in range(1, len(free) - 1):
        bodies[f"length {at}"] = constrained(
            json_schema(SCHEMAS["long names"]), temperature=temperature, max_tokens=at + 1
        )
        if free[at] not in free[:at]:
            bodies[f"stop {at}"] = constrained(
                json_schema(SCHEMAS["long names"]), temperature=temperature, stop_token_ids=[free[at]]
            )
    num_inside = {"length": 0, "stop": 0}
    for name, outcome in assert_all_alike(pair, bodies).items():
        kind, at_text = name.split()
        assert outcome.token_ids == free[: int(at_text) + 1]
        is_length = kind == "length"
        assert outcome.finish_reason == (pb.FINISH_REASON_LENGTH if is_length else pb.FINISH_REASON_STOP)
        last = outcome.verdicts[-1]
        # A draft goes no further than the length, whose last token is the target's own.
        num_inside[kind] += last.num_accepted >= len(last.token_ids) - is_length > 0
    assert min(num_inside.values()) > 2, num_inside


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_of_thinking_may_fall_inside_a_draft(temperature: float, pair: LocalPair) -> None:
    """What the model writes freely first has the token somewhere; from behind it the grammar holds."""
    free = constrained(pb.Constraint(), temperature=temperature, max_tokens=40)
    free.sampling.ClearField("constraint")
    thoughts = plainly(pair, {"a": free})["a"].token_ids
    positions = [at for at in range(3, len(thoughts)) if thoughts[at] not in thoughts[:at]]
    choice = TEXTS["one of several"].choice
    bodies = {
        str(at): constrained(pb.Constraint(choice=choice, after_token_id=thoughts[at]), temperature=temperature)
        for at in positions
    }
    num_inside = 0
    for session_id, outcome in assert_all_alike(pair, bodies).items():
        at = int(session_id)
        assert outcome.token_ids[: at + 1] == thoughts[: at + 1]
        assert text_of(Outcome(token_ids=outcome.token_ids[at + 1 :])) in choice.texts
        for verdict in outcome.verdicts:
            num_inside += 0 <= 40 + at - verdict.start_position < verdict.num_accepted - 1
    assert num_inside > 0


def test_an_answer_without_thoughts_is_constrained_and_one_with_thoughts_is_so_behind_them(pair: LocalPair) -> None:
    free = constrained(pb.Constraint(), temperature=0.0, max_tokens=40)
    free.sampling.ClearField("constraint")
    thoughts = plainly(pair, {"a": free})["a"].token_ids
    end = next(token for at, token in enumerate(thoughts) if at > 3 and token not in thoughts[:at])
    choice = TEXTS["one of several"].choice
    bodies = {
        name: constrained(pb.Constraint(choice=choice, after_token_id=end, opening_token_id=opening), temperature=0.0)
        for name, opening in (("thinks", thoughts[0]), ("answers", BOS))
    }
    found = assert_all_alike(pair, bodies)
    num_thoughts = thoughts.index(end) + 1
    assert found["thinks"].token_ids[:num_thoughts] == thoughts[:num_thoughts]
    assert text_of(Outcome(token_ids=found["thinks"].token_ids[num_thoughts:])) in choice.texts
    assert text_of(found["answers"]) in choice.texts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_session_that_is_opened_again_goes_on_equal(temperature: float, pair: LocalPair) -> None:
    """As after the loss of a target, and of a draft: the place in the grammar is found from the committed tokens."""
    rng = random.Random(8)
    bodies = {
        name: constrained(json_schema(SCHEMAS[name]), temperature=temperature)
        for name in ("nested", "long names", "uuid")
    }
    bodies["text"] = constrained(TEXTS["words"], temperature=temperature)
    expected = plainly(pair, bodies)
    num_reopened = 0

    def reopen(pair: LocalPair) -> None:
        nonlocal num_reopened
        for session_id in sorted(pair.live):
            if pair.num_output(session_id) and rng.random() < 0.5:
                num_reopened += 1
                pair.reopen(session_id)

    found = pair.run(bodies, rng=rng, each_turn=reopen)
    assert num_reopened > 2
    for session_id, outcome in found.items():
        assert_equal(outcome, expected[session_id])


def test_tokens_that_the_constraint_does_not_allow_cannot_be_taken_up(pair: LocalPair) -> None:
    body = constrained(TEXTS["one"])
    body.token_ids.append(500)
    outcome = pair.run({"a": body}, use_draft=False)["a"]
    assert outcome.error is not None
    assert "open.token_ids" in outcome.error.status.message


def test_a_bad_constraint_costs_its_own_session_only(pair: LocalPair) -> None:
    bodies = {
        "bad": constrained(pb.Constraint(regex="(?=a)b")),
        "good": constrained(TEXTS["telephone"]),
        "none": constrained(pb.Constraint()),
    }
    outcomes = pair.run(bodies, use_draft=False)
    for name, field in (("bad", "open.sampling.constraint.regex"), ("none", "open.sampling.constraint")):
        error = outcomes[name].error
        assert error is not None
        assert error.status.message.startswith(f"{field}: ")
    assert re.fullmatch(TEXTS["telephone"].regex, text_of(outcomes["good"]))


@pytest.mark.parametrize("mode", [pb.VERIFY_MODE_COUPLED, REJECTION])
def test_a_constraint_that_other_parameters_contradict_is_the_clients_fault(
    mode: pb.VerifyMode.ValueType, pair: LocalPair
) -> None:
    """It is met when no token is left, and it is no fault of the model's."""
    bodies = {
        "a": constrained(TEXTS["telephone"], temperature=1.0, verify_mode=mode),
        "b": constrained(TEXTS["telephone"], temperature=1.0, verify_mode=mode, allowed_token_ids=[5]),
    }
    found = pair.run(bodies)
    assert found["a"].finish_reason == pb.FINISH_REASON_STOP
    error = found["b"].error
    assert error is not None
    assert error.status.code == code_pb2.INVALID_ARGUMENT
    assert error.status.message.startswith("open.sampling.allowed_token_ids: ")


@pytest.mark.parametrize("mode", [pb.VERIFY_MODE_COUPLED, REJECTION])
def test_what_a_proposal_holds_against_the_constraint_is_never_committed(
    mode: pb.VerifyMode.ValueType, pair: LocalPair
) -> None:
    rng = random.Random(2)
    schema = SCHEMAS["record"]

    def propose(session_id: str, tokens: list[int]) -> list[bytes]:
        ids = [rng.randrange(4096) for _ in range(4)]
        sparse = [pb.SparseDistribution(token_ids=[token], probs=[1.0]) for token in ids]
        proposal = pb.Proposal(start_position=len(tokens), token_ids=ids)
        if mode == REJECTION:
            proposal.distributions.extend(sparse)
        return [proposal.SerializeToString()]

    body = constrained(json_schema(schema), temperature=1.0, verify_mode=mode)
    outcome = pair.run({"a": body}, use_draft=False, propose=propose)["a"]
    check_schema(outcome, schema)
    assert not outcome.rejected
