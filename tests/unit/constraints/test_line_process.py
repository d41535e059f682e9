"""Processes that check or follow grammars are replaced when they hang, die or take too much."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from specdec.constraints.grammar import apart
from specdec.constraints.grammar.checker import GrammarChecker
from specdec.constraints.grammar.follower import Following
from specdec.constraints.grammar.line_process import ChildLost, LineProcess
from specdec.constraints.grammar.source import GrammarSource, TokenizerArguments
from tests.support.engine.grammars import EOS, TOKENIZER, VOCAB_SIZE

_ARGUMENTS = TokenizerArguments(tokenizer=TOKENIZER.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS])
_CHILD = "specdec.constraints.grammar.apart_child"
_GRAMMAR = 'start: "a"'


def stopped(process: LineProcess) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_checker_that_hangs_is_replaced_and_the_grammar_compiles() -> None:
    own = GrammarChecker(_ARGUMENTS)
    assert own.check(_GRAMMAR)[0] == ""
    assert own.process is not None
    own.process._hung_s = 0.5  # from now on: a start may have to wait for a disk or a processor
    former = own.process.pid
    os.kill(former, signal.SIGSTOP)
    assert own.check(_GRAMMAR)[0] == ""
    assert own.process is not None and own.process.pid != former
    own.close()


@pytest.mark.parametrize("module", [_CHILD, "specdec.constraints.grammar.checker_child"])
def test_signals_to_a_services_whole_group_leave_its_children_to_answer_while_it_drains(module: str) -> None:
    child = LineProcess(module, {"tokenizer": _ARGUMENTS})
    question = {"close": 0} if module == _CHILD else _GRAMMAR
    child.ask(question)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(child.pid, number)
        child.ask(question)
    child.close()


def test_a_child_that_hangs_with_a_full_pipe_is_given_up() -> None:
    child = LineProcess(_CHILD, {"tokenizer": _ARGUMENTS})
    child.ask({"close": 0})
    child._hung_s = 0.5
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ChildLost, match="hung"):
        child.ask("x" * 10_000_000)


def test_a_child_that_takes_too_much_processor_time_is_given_up() -> None:
    child = LineProcess(_CHILD, {"tokenizer": _ARGUMENTS})
    child.ask({"close": 0})
    places = {"after_token_id": None, "opening_token_id": None}
    following = {"vocab_size": VOCAB_SIZE, "eos_token_ids": [EOS], **places, "holds_back_eos": True}
    question = {
        "key": 1,
        "field": "constraint.grammar",
        "text": '{"grammars": [{"lark_grammar": "start: s\\ns: s s | /[a-z ]/ | \\"\\""}]}',
        "following": following,
        "tokens": TOKENIZER.encode("a b c d " * 60, add_special_tokens=False).ids,
        "held_back": [],
    }
    with pytest.raises(ChildLost, match="processor time"):
        child.ask(question, most_cpu_s=0.3)


def test_a_constraint_whose_process_answers_nonsense_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nonsense(LineProcess):
        def ask(self, question: object, most_cpu_s: float = float("inf")) -> Any:
            answer = super().ask(question, most_cpu_s)
            return {"spent_s": None} if "bad" in str(question) else answer

    monkeypatch.setattr(apart, "LineProcess", Nonsense)
    followers = apart.ApartFollowers(_ARGUMENTS)
    following = Following(
        vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], after_token_id=None, opening_token_id=None, holds_back_eos=False
    )
    bad, good = (followers.follow(GrammarSource("field", text), following) for text in ('start: "bad"', _GRAMMAR))
    for follower in (bad, good):
        follower.commit([], ())
        until_s = time.monotonic() + 60
        while follower.mask is None:
            assert time.monotonic() < until_s
            time.sleep(0.005)
    assert bad.mask is not None and bad.mask.fault is not None and "cannot be followed" in str(bad.mask.fault)
    assert good.mask is not None and good.mask.fault is None
