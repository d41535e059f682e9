"""Stores of captured graphs: what they capture, keep, drop, and do after a capture that fails."""

from collections.abc import Callable

import pytest
import torch

from specdec.engine.cuda import buckets
from specdec.engine.cuda.buckets import BucketedPasses, PassShape
from specdec.engine.cuda.passes import CAPTURE_BYTES, CudaCapture
from tests.support.engine.captures import Captures


class Store(BucketedPasses[str]):
    def __init__(self, capture: CudaCapture, subject: str = "a test", may_replay: Callable[[], bool] = lambda: True):
        super().__init__(capture, subject, PassShape(1, 0, 1, torch.device("cpu")), may_replay)
        self.keys: list[str] = []
        self.fails_for = ""
        self.error: RuntimeError = RuntimeError("operation not permitted when stream is capturing")

    def captured(self, key: str) -> str:
        if key == self.fails_for:
            raise self.error
        self.keys.append(key)
        return f"graph of {key}"


def made(*, is_alone: bool = True, bytes_each: int = 0) -> tuple[CudaCapture, Store]:
    capture = Captures(bytes_each, is_alone=is_alone)
    return capture, Store(capture)


def test_a_graph_is_captured_once_and_the_least_recently_used_one_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_MOST_GRAPHS", 2)
    _, store = made()
    assert [store.get(key) for key in "abac"] == ["graph of a", "graph of b", "graph of a", "graph of c"]
    assert (store.keys, store.num_graphs) == (["a", "b", "c"], 2)
    store.get("a")
    assert store.keys == ["a", "b", "c"], "b was used longest ago"


def test_a_store_drops_only_its_own_graphs_and_what_is_given_back_are_all() -> None:
    capture, first = made()
    second = Store(capture, "another test")
    for store, key in ((first, "a"), (second, "a"), (first, "b")):
        store.get(key)
    second.drop(for_good=True)
    assert (first.num_graphs, second.num_graphs) == (2, 0)
    capture.drop()
    assert capture.num_graphs == 0
    assert first.get("a") == "graph of a"


def test_graphs_of_a_store_that_is_gone_are_dropped() -> None:
    capture, store = made()
    other = Store(capture, "another test")
    store.get("a")
    other.get("a")
    del store
    assert (capture.num_graphs, other.num_graphs) == (1, 1)


def test_after_three_captures_that_fail_none_is_tried_and_none_is_found() -> None:
    _, store = made()
    store.fails_for = "b"
    assert [store.get(key) for key in "abbca"] == ["graph of a", None, None, "graph of c", "graph of a"]
    assert [store.get(key) for key in "bac"] == [None, None, None]
    assert (store.keys, store.has_failed, store.num_graphs) == (["a", "c"], True, 0)


def test_a_capture_without_memory_drops_all_and_is_tried_again() -> None:
    _, store = made()
    for key in "ab":
        store.get(key)
    store.fails_for, store.error = "e", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
    assert store.get("e") is None
    assert store.num_graphs == 0
    store.fails_for = ""
    assert store.get("e") == "graph of e"
    assert store.get("b") == "graph of b"
    assert store.keys == list("abeb")


def test_nothing_is_captured_while_graphs_hold_their_share_of_memory() -> None:
    capture, store = made(bytes_each=CAPTURE_BYTES // 2 + 1)
    store.get("a")
    for _ in range(2):
        capture(lambda: torch.zeros(1))
    assert [store.get(key) for key in "ba"] == [None, "graph of a"]
    capture.drop()
    assert [store.get(key) for key in "ba"] == ["graph of b", "graph of a"]


def test_of_several_ranks_all_capture_the_same_or_end() -> None:
    capture, store = made(is_alone=False, bytes_each=CAPTURE_BYTES + 1)
    capture(lambda: torch.zeros(1))
    capture.ahead_s = 1e9
    store.capture_ahead("ab")
    assert store.keys == ["a", "b"]
    store.fails_for = "c"
    with pytest.raises(RuntimeError, match="not permitted"):
        store.get("c")


def test_nothing_is_captured_and_no_graph_is_found_while_there_may_be_none() -> None:
    is_allowed = iter([False, True, False, True])
    store = Store(Captures(), "a test", lambda: next(is_allowed))
    assert [store.get("a") for _ in range(4)] == [None, "graph of a", None, "graph of a"]
    assert store.keys == ["a"]


def test_captures_ahead_end_where_the_time_does_or_one_fails() -> None:
    now_s = iter([10.0, 10.0, 22.0, 31.0, 32.0])
    capture, store = made()
    store.capture_ahead("abcd", lambda: next(now_s))
    assert store.keys == ["a", "b"]
    assert capture.ahead_s == 22.0
    capture.ahead_s = 0.0
    store.fails_for = "c"
    store.capture_ahead("abcd")
    assert store.keys == ["a", "b"]
