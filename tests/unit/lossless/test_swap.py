"""`SetDrafters` at a target in this process: streams stay as they are, and what cannot be had changes nothing."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specdec.config.drafter_options import Eagle3Options, NgramOptions, SuffixOptions, parse_drafters
from specdec.drafting.heads.methods.registry import load_head
from specdec.drafting.heads.target import HeadTarget
from specdec.replica.bridge.frames import Frame, FrameKind
from specdec.target_service.policy.gate_state import Phase
from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2
from tests.support.engine.local_pair import MODELS, LocalPair, open_session, prompts
from tests.support.heads import checkpoints
from tests.support.heads.checkpoints import Sizes
from tests.unit.lossless.sessions import Plainly, assert_all_equal, body_of

EAGLE3 = {"method": "eagle3", "model": str(MODELS / "eagle3")}
USELESS = {"method": "layer_skip", "skip_attention_layers": [0, 1, 2], "skip_mlp_layers": [0, 1, 2]}
SKIP = {"method": "layer_skip", "skip_mlp_layers": [1, 2, 4, 5, 6]}


@pytest.fixture
def running(loaded_pair: LocalPair) -> Iterator[LocalPair]:
    """A target whose drafters are ngram and suffix."""
    loaded_pair.reset(drafters=[NgramOptions(), SuffixOptions()])
    yield loaded_pair
    loaded_pair.reset()


def asked(*drafters: Any) -> str:
    return json.dumps(drafters)


def told(pair: LocalPair, call_id: int) -> list[str]:
    """Names in the answer to a call that was done."""
    frame = pair.answer(call_id)
    assert frame.kind is FrameKind.MESSAGE, refusal(pair, call_id)
    return list(target_pb2.SetDraftersResponse.FromString(frame.payload).drafters)


def refusal(pair: LocalPair, call_id: int) -> tuple[int, str, str]:
    """Code, reason and text of the answer to a call that was not."""
    frame = pair.answer(call_id)
    assert frame.kind is FrameKind.STREAM_ABORT
    status, info = status_pb2.Status.FromString(frame.payload), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return status.code, info.reason, status.message


def shown(pair: LocalPair) -> list[str]:
    return list(pair.verifier.load().drafters.names)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sets_that_come_and_go_change_no_token(temperature: float, running: LocalPair, plainly: Plainly) -> None:
    opens = {str(i): body_of({"prompt": i, "temperature": temperature, "max_tokens": 90}) for i in range(4)}
    for body in opens.values():
        plainly(body)
    running.reset(drafters=[NgramOptions()])
    sets = [
        asked({"method": "ngram", "prompt_lookup_min": 1}, EAGLE3),
        "suffix,prediction",
        asked("suffix", {**EAGLE3, "num_speculative_tokens": 3}, SKIP),
        asked({"method": "eagle3", "model": "nowhere"}),
        "",
        asked(EAGLE3, "ngram"),
    ]
    rng, calls, seen = random.Random(7), list[int](), set[tuple[str, ...]]()

    def disturb(pair: LocalPair) -> None:
        seen.add(tuple(pair.verifier.local_drafters.names))
        if rng.random() < 0.4 and (not calls or calls[-1] in pair.answers):
            calls.append(pair.call(sets[len(calls) % len(sets)]))

    names = set[str]()
    while len(calls) < 2 * len(sets):  # what loads takes as long as it takes
        outcomes = running.run(opens, use_draft=False, each_turn=disturb)
        assert_all_equal(outcomes, opens, plainly)
        names |= {record.name for outcome in outcomes.values() for v in outcome.verdicts for record in v.drafters}
    kinds = [running.answer(call).kind for call in calls]
    assert {index % len(sets) for index, kind in enumerate(kinds) if kind is FrameKind.STREAM_ABORT} == {3}
    assert {("ngram", "eagle3"), ("suffix", "prediction"), ("suffix", "eagle3", "layer_skip"), ()} <= seen
    assert names >= {"ngram", "suffix", "eagle3", "layer_skip"}


def test_streams_use_a_new_drafter_at_once_and_one_that_is_gone_no_more(running: LocalPair, plainly: Plainly) -> None:
    body = open_session(prompts()[0][:40], max_tokens=120, ignore_eos=True)
    expected = plainly(body)
    running.reset(drafters=[SuffixOptions()])
    body.prediction_token_ids.extend(expected.token_ids)
    length_at: dict[str, int] = {}

    def disturb(pair: LocalPair) -> None:
        number = pair.num_output("a")
        for name, least in (("prediction", 30), ("ngram", 80)):
            if number >= least and name not in length_at:
                pair.call(name)
                length_at[name] = number

    outcome = running.run({"a": body}, use_draft=False, each_turn=disturb)["a"]
    assert outcome.token_ids == expected.token_ids
    names: dict[str, list[int]] = {}
    for verdict in outcome.verdicts:
        for record in verdict.drafters:
            names.setdefault(record.name, []).append(verdict.start_position - 40)
    assert max(names["suffix"]) <= length_at["prediction"] <= min(names["prediction"])
    assert max(names["prediction"]) <= length_at["ngram"] <= min(names["ngram"])
    assert outcome.accepted_by.count("prediction") > 30


def test_a_head_that_comes_in_mid_stream_guesses_right_though_it_has_not_seen_the_prompt(
    running: LocalPair, plainly: Plainly
) -> None:
    body = open_session(prompts()[0][:40], max_tokens=120, ignore_eos=True)
    expected = plainly(body)
    running.reset()
    is_called = False

    def disturb(pair: LocalPair) -> None:
        nonlocal is_called
        if not is_called and pair.num_output("a") > 20:
            is_called = told(pair, pair.call(asked(EAGLE3))) == ["eagle3"]

    outcome = running.run({"a": body}, use_draft=False, each_turn=disturb)["a"]
    assert is_called
    assert outcome.token_ids == expected.token_ids
    assert outcome.num_of("eagle3", "num_accepted") > 0


def test_what_is_equal_stays_and_what_differs_is_replaced(running: LocalPair) -> None:
    panel = running.verifier.local_drafters
    before = dict(panel._drafters)
    wanted = asked("ngram", {"method": "suffix", "suffix_decoding_max_tree_depth": 9}, "lookahead")
    assert told(running, running.call(wanted)) == ["ngram", "suffix", "lookahead"] == shown(running)
    assert panel._drafters["ngram"] is before["ngram"]
    assert panel._drafters["suffix"] is not before["suffix"]
    assert told(running, running.call("lookahead,ngram")) == ["lookahead", "ngram"] == shown(running)
    assert told(running, running.call("")) == [] == shown(running)


def test_one_that_was_dropped_comes_back_when_it_is_named_again(running: LocalPair) -> None:
    panel = running.verifier.local_drafters
    panel._drop("suffix", RuntimeError("broken on purpose"))
    assert shown(running) == ["ngram"]
    assert told(running, running.call("ngram,suffix")) == ["ngram", "suffix"]


def misfit(folder: Path) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(checkpoints.save(folder, *checkpoints.eagle3(Sizes(vocab=50, target=32))))}


def test_what_is_refused_is_named_and_changes_nothing(running: LocalPair, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(
        '{"architectures": 5, "transformer_layer_config": {"hidden_size": []}}'
    )
    before = dict(running.verifier.local_drafters._drafters)
    bad_fields = {
        "unheard_of": "unheard_of",
        "ngram,ngram": "named twice",
        "[" * 60_000: "is not JSON",
        '["ngram"': "is not JSON",
        "[" + "9" * 5000 + "]": "drafters: ",
        "7,8": "7",
        asked(5): "drafters: ",
        asked({"method": "ngram", "prompt_lookup_min": 0}): "prompt_lookup_min",
        asked({"method": "ngram", "prompt_lookup_max": "x" * 50_000}): "prompt_lookup_max",
        asked({"method": "eagle3"}): "model",
        asked({"method": "openai_api", "base_url": "http://localhost/v1", "model": "M"}): "openai_api",
    }
    for text, words in bad_fields.items():
        code, reason, message = refusal(running, running.call(text))
        assert (code, reason) == (code_pb2.INVALID_ARGUMENT, "INVALID_FIELD")
        assert message.startswith("drafters: ")
        assert words in message
        assert len(message) < 1000
    misfits = {
        asked("lookahead", {"method": "eagle3", "model": str(tmp_path)}): "eagle3: .*config.json",
        asked("lookahead", {"method": "eagle3", "model": "a\0b"}): "eagle3: ",
        asked("lookahead", {"method": "medusa", "model": str(tmp_path / "odd")}): "medusa: ",
        asked("lookahead", {"method": "dflash", "model": str(tmp_path / "odd")}): "dflash: ",
        asked("lookahead", misfit(tmp_path / "misfit")): "eagle3: ",
        asked("lookahead", {**EAGLE3, "method": "peagle"}): "peagle: .*a head of method eagle3",
        asked("lookahead", {**EAGLE3, "layer_ids": [1, 2, 99]}): "eagle3: .*99",
        asked("lookahead", EAGLE3, {"method": "layer_skip", "exit_layer": 99}): "layer_skip: ",
        asked(
            "lookahead", {"method": "layer_skip", "skip_attention_layers": [0, 1, 2], "skip_mlp_layers": [0, 1, 2]}
        ): ("layer_skip: "),
    }
    for text, pattern in misfits.items():
        code, reason, message = refusal(running, running.call(text))
        assert (code, reason) == (code_pb2.FAILED_PRECONDITION, "DRAFTER_REFUSED"), message
        assert re.fullmatch(f"drafters: {pattern}.*; nothing is changed", message, re.DOTALL), message
    assert running.verifier.local_drafters._drafters == before
    assert running.target_built.engine.tap_ids == ()


def test_bytes_that_are_no_request_are_refused(running: LocalPair) -> None:
    call = running.call("")
    running.target_port.inbox[-1] = running.target_port.inbox[-1]._replace(payload=b"\xff\xff")
    assert refusal(running, call)[:2] == (code_pb2.INVALID_ARGUMENT, "INVALID_FIELD")


def test_an_engine_that_answers_no_calls_says_so(running: LocalPair) -> None:
    running.draft_port.inbox.append(Frame(FrameKind.CALL, 9, b""))
    running.draft._turn()
    running.draft._turn()
    (frame,) = [each for each in running.draft_port.outbox if each.stream_id == 9]
    assert frame.kind is FrameKind.STREAM_ABORT
    assert status_pb2.Status.FromString(frame.payload).code == code_pb2.UNIMPLEMENTED


def test_a_load_that_hangs_is_given_up_and_keeps_other_heads_out_until_it_ends(
    running: LocalPair, tmp_path: Path
) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    hung = {"method": "eagle3", "model": str(tmp_path)}
    first = running.call(asked("lookahead", hung), load_timeout_ms=100)
    assert refusal(running, running.call("")) == (
        code_pb2.RESOURCE_EXHAUSTED,
        "DRAFTERS_LOADING",
        "drafters: the drafters are being set by somebody else; nothing is changed",
    )
    code, reason, message = refusal(running, first)
    assert (code, reason) == (code_pb2.DEADLINE_EXCEEDED, "DRAFTER_LOAD_TIMEOUT")
    assert message == "drafters: eagle3: not loaded after 0.1 s; nothing is changed"
    assert shown(running) == ["ngram", "suffix"]
    assert refusal(running, running.call(asked(EAGLE3)))[1] == "DRAFTERS_LOADING"
    assert told(running, running.call("suffix")) == ["suffix"]
    pipe.write_text("{}")  # whoever waited for it goes on
    while (frame := running.answer(running.call(asked(EAGLE3)))).kind is FrameKind.STREAM_ABORT:
        pass
    assert target_pb2.SetDraftersResponse.FromString(frame.payload).drafters == ["eagle3"]


def test_whoever_leaves_before_it_is_done_has_changed_nothing(running: LocalPair, tmp_path: Path) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    call = running.call(asked({"method": "eagle3", "model": str(tmp_path)}))
    running.target._turn()
    running.leave(call)
    running.target._turn()
    assert told(running, running.call("ngram")) == ["ngram"]
    pipe.write_text("{}")
    assert call not in running.answers


def test_a_head_that_was_removed_is_let_go(running: LocalPair) -> None:
    assert told(running, running.call(asked(EAGLE3))) == ["eagle3"]
    running.run({"a": open_session(prompts()[0][:40], max_tokens=20)}, use_draft=False)
    cache = weakref.ref(running.verifier.local_drafters._drafters["eagle3"].cache)  # type: ignore[attr-defined]
    assert told(running, running.call("")) == []
    running.answers.clear()
    gc.collect()
    assert cache() is None
    assert running.target_built.engine.tap_ids == ()


def test_a_session_gets_no_drafter_that_it_did_not_name(running: LocalPair, plainly: Plainly) -> None:
    body = open_session(prompts()[0][:40] * 2, max_tokens=60, ignore_eos=True)
    expected = plainly(body)
    running.reset(drafters=[NgramOptions()])
    body.drafters.extend(["ngram", "suffix"])
    is_called = False

    def disturb(pair: LocalPair) -> None:
        nonlocal is_called
        if not is_called and pair.num_output("a") > 10:
            is_called = told(pair, pair.call("suffix,prediction")) == ["suffix", "prediction"]

    outcome = running.run({"a": body}, use_draft=False, each_turn=disturb)["a"]
    assert outcome.token_ids == expected.token_ids
    assert {record.name for verdict in outcome.verdicts for record in verdict.drafters} == {"ngram", "suffix"}


def test_sessions_whose_drafters_change_are_judged_anew(running: LocalPair) -> None:
    running.opens, running.epochs = {"a": open_session(prompts()[0][:40], max_tokens=60)}, {"a": 1}
    running.send_entry("a", open=running.opens["a"])
    for _ in range(4):
        running.target._turn()
    (session,) = running.target_host.sessions
    assert session.sources == "draft_model ngram suffix"
    assert session.gate is not None
    session.gate.phase = Phase.OFF
    running.call("suffix,lookahead")
    running.target._turn()
    assert session.sources == "draft_model suffix lookahead"
    assert session.gate is None or session.gate.kind.endswith(session.sources)
    running.reset()


def test_the_load_tells_a_coordinator_at_once(running: LocalPair) -> None:
    running.call(asked("suffix", {"method": "ngram", "prompt_lookup_min": 3}))
    running.target_port.outbox.clear()
    running.target._turn()
    loads = [frame for frame in running.target_port.outbox if frame.kind is FrameKind.LOAD]
    drafters = pb.LoadReport.FromString(loads[-1].payload).drafters
    assert list(drafters.names) == ["suffix", "ngram"]
    assert [json.loads(options) for options in drafters.options] == [{}, {"prompt_lookup_min": 3}]
    order = [frame.kind for frame in running.target_port.outbox if frame.kind is FrameKind.LOAD or frame.stream_id > 1]
    assert order.index(FrameKind.LOAD) < order.index(FrameKind.MESSAGE)


def test_what_is_told_of_drafters_sets_the_same_ones_again(running: LocalPair) -> None:
    call_id = running.call(asked({"method": "suffix", "suffix_decoding_max_tree_depth": 7}, EAGLE3, "ngram"))
    frame = running.answer(call_id)
    answer = target_pb2.SetDraftersResponse.FromString(frame.payload)
    options = [json.loads(each) for each in answer.drafter_options]
    assert [each.pop("model", None) for each in options] == [None, EAGLE3["model"], None]
    told = zip(answer.drafters, map(json.loads, answer.drafter_options), strict=True)
    again = [{"method": name, **own} for name, own in told]
    assert all(map(running.verifier.local_drafters.has, parse_drafters(asked(*again))))


def test_files_of_a_head_are_read_without_a_pass_of_the_target(
    running: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = running.target_built
    target = HeadTarget(built.model, built.engine, built.sampler)
    monkeypatch.setattr(target.runner, "_step_model", None)
    assert load_head(Eagle3Options(model=EAGLE3["model"]), target).layer_ids
