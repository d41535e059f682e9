"""A store of captured graphs: what it captures, keeps, drops, and does after a capture that fails."""

import pytest

from specdec.engine.cuda import passes
from specdec.engine.cuda.passes import GraphStore


class Capturing:
    def __init__(self) -> None:
        self.captured: list[str] = []
        self.fails_for = ""

    def __call__(self, key: str) -> str:
        if key == self.fails_for:
            raise RuntimeError("out of memory")
        self.captured.append(key)
        return f"graph of {key}"


def test_a_graph_is_captured_once_and_the_least_recently_used_one_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_MOST_GRAPHS", 2)
    store, capture = GraphStore[str, str]("a test"), Capturing()
    assert [store.get(key, capture) for key in "abac"] == ["graph of a", "graph of b", "graph of a", "graph of c"]
    assert (capture.captured, len(store)) == (["a", "b", "c"], 2)
    store.get("a", capture)
    assert capture.captured == ["a", "b", "c"], "b was used longest ago"


def test_after_a_capture_that_fails_none_is_tried_and_none_is_found() -> None:
    store, capture = GraphStore[str, str]("a test"), Capturing()
    capture.fails_for = "b"
    assert [store.get(key, capture) for key in "abca"] == ["graph of a", None, None, None]
    assert capture.captured == ["a"]


def test_nothing_is_captured_and_no_graph_is_found_while_there_may_be_none() -> None:
    is_allowed = iter([False, True, False, True])
    store, capture = GraphStore[str, str]("a test", may_replay=lambda: next(is_allowed)), Capturing()
    assert [store.get("a", capture) for _ in range(4)] == [None, "graph of a", None, "graph of a"]
    assert capture.captured == ["a"]


def test_captures_ahead_end_where_the_time_does_or_one_fails() -> None:
    now_s = iter([10.0, 10.0, 12.0, 15.0, 16.0])
    store, capture = GraphStore[str, str]("a test"), Capturing()
    assert store.prepare("abcd", capture, lambda elapsed_s: elapsed_s < 5, lambda: next(now_s)) == 6.0
    assert capture.captured == ["a", "b"]
    capture.fails_for = "c"
    store.prepare("abcd", capture, lambda elapsed_s: True)
    assert capture.captured == ["a", "b"]
