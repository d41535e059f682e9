"""One cache of captured graphs: what it captures, keeps, drops, and does after a capture that fails."""

import pytest
import torch

from specdec.engine.cuda import passes
from specdec.engine.cuda.passes import CAPTURE_BYTES, GraphCache, GraphStore
from tests.support.engine.captures import Captures


class Capturing:
    def __init__(self) -> None:
        self.captured: list[str] = []
        self.fails_for = ""
        self.error: RuntimeError = RuntimeError("operation not permitted when stream is capturing")

    def __call__(self, key: str) -> str:
        if key == self.fails_for:
            raise self.error
        self.captured.append(key)
        return f"graph of {key}"


def made(*, is_alone: bool = True, bytes_each: int = 0) -> tuple[GraphCache, GraphStore[str, str], Capturing]:
    cache = GraphCache(Captures(bytes_each), is_alone=is_alone)
    return cache, GraphStore(cache, "a test"), Capturing()


def test_a_graph_is_captured_once_and_the_least_recently_used_one_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_MOST_GRAPHS", 2)
    _, store, capture = made()
    assert [store.get(key, capture) for key in "abac"] == ["graph of a", "graph of b", "graph of a", "graph of c"]
    assert (capture.captured, len(store)) == (["a", "b", "c"], 2)
    store.get("a", capture)
    assert capture.captured == ["a", "b", "c"], "b was used longest ago"


def test_stores_of_one_cache_share_its_places_and_drop_only_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_MOST_GRAPHS", 3)
    cache, first, capture = made()
    second = GraphStore[str, str](cache, "another test")
    for store, key in ((first, "a"), (second, "a"), (first, "b"), (second, "b")):
        store.get(key, capture)
    assert (len(first), len(second), len(cache)) == (1, 2, 3)
    second.clear()
    assert (len(first), len(second)) == (1, 0)


def test_graphs_of_a_store_that_is_gone_are_dropped() -> None:
    cache, store, capture = made()
    other = GraphStore[str, str](cache, "another test")
    store.get("a", capture)
    other.get("a", capture)
    del store
    assert (len(cache), len(other)) == (1, 1)


def test_after_three_captures_that_fail_none_is_tried_and_none_is_found() -> None:
    _, store, capture = made()
    capture.fails_for = "b"
    assert [store.get(key, capture) for key in "abbca"] == ["graph of a", None, None, "graph of c", "graph of a"]
    assert [store.get(key, capture) for key in "bac"] == [None, None, None]
    assert (capture.captured, store.has_failed, len(store)) == (["a", "c"], True, 0)


def test_a_capture_without_memory_drops_the_half_that_was_used_longest_ago_and_is_tried_again() -> None:
    _, store, capture = made()
    for key in "abcd":
        store.get(key, capture)
    capture.fails_for, capture.error = "e", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
    assert store.get("e", capture) is None
    assert len(store) == 2
    capture.fails_for = ""
    assert store.get("e", capture) == "graph of e"
    assert store.get("c", capture) == "graph of c"
    assert capture.captured == list("abcde")


def test_nothing_is_captured_while_graphs_hold_their_share_of_memory() -> None:
    cache, store, capture = made(bytes_each=CAPTURE_BYTES // 2 + 1)
    store.get("a", capture)
    for _ in range(2):
        cache.capture(lambda: torch.zeros(1))
    assert [store.get(key, capture) for key in "ba"] == [None, "graph of a"]


def test_of_several_ranks_all_capture_the_same_or_end() -> None:
    cache, store, capture = made(is_alone=False, bytes_each=CAPTURE_BYTES + 1)
    cache.capture(lambda: torch.zeros(1))
    cache.ahead_s = 1e9
    store.prepare("ab", capture)
    assert capture.captured == ["a", "b"]
    capture.fails_for = "c"
    with pytest.raises(RuntimeError, match="not permitted"):
        store.get("c", capture)


def test_nothing_is_captured_and_no_graph_is_found_while_there_may_be_none() -> None:
    is_allowed = iter([False, True, False, True])
    store, capture = GraphStore[str, str](GraphCache(Captures()), "a test", lambda: next(is_allowed)), Capturing()
    assert [store.get("a", capture) for _ in range(4)] == [None, "graph of a", None, "graph of a"]
    assert capture.captured == ["a"]


def test_captures_ahead_end_where_the_time_does_or_one_fails() -> None:
    now_s = iter([10.0, 10.0, 22.0, 31.0, 32.0])
    cache, store, capture = made()
    store.prepare("abcd", capture, lambda: next(now_s))
    assert capture.captured == ["a", "b"]
    assert cache.ahead_s == 22.0
    cache.ahead_s = 0.0
    capture.fails_for = "c"
    store.prepare("abcd", capture)
    assert capture.captured == ["a", "b"]
