"""Longest known prefix first, then least load."""

from __future__ import annotations

from coordinator.router import PrefixRouter

PROMPT = list(range(200))


def test_without_prefixes_the_least_loaded_replica_is_picked() -> None:
    assert PrefixRouter().pick(PROMPT, b"", {"a": 3, "b": 1, "c": 2}) == "b"


def test_the_replica_that_has_the_longest_prefix_is_picked_though_it_is_busier() -> None:
    router = PrefixRouter()
    assert router.pick(PROMPT[:64], b"", {"a": 1, "b": 0}) == "b"
    assert router.pick([*PROMPT[:32], *[9] * 100], b"", {"a": 0, "b": 5}) == "b"
    assert router.pick([9] * 100, b"", {"a": 0, "b": 5}) == "a"


def test_affinity_gives_way_to_a_large_imbalance() -> None:
    router = PrefixRouter(max_imbalance=8)
    router.pick(PROMPT, b"", {"a": 0})
    assert router.pick(PROMPT, b"", {"a": 8, "b": 0}) == "a"
    assert router.pick(PROMPT, b"", {"a": 9, "b": 0}) == "b"


def test_tenants_do_not_share_prefixes() -> None:
    router = PrefixRouter()
    router.pick(PROMPT, b"one", {"b": 0})
    assert router.pick(PROMPT, b"two", {"a": 0, "b": 0}) == "a"


def test_a_replica_that_lost_its_cache_has_no_prefixes() -> None:
    router = PrefixRouter()
    router.pick(PROMPT, b"", {"b": 0})
    router.forget("b")
    assert router.pick(PROMPT, b"", {"a": 0, "b": 0}) == "a"


def test_old_prefixes_are_forgotten_when_there_are_too_many() -> None:
    router = PrefixRouter(max_blocks=4)
    router.pick(PROMPT[:64], b"", {"b": 0})
    router.pick([7] * 128, b"", {"b": 0})
    assert router.pick(PROMPT[:64], b"", {"a": 0, "b": 0}) == "a"


def test_the_replica_that_wrote_an_output_is_picked_for_what_follows_it() -> None:
    router = PrefixRouter()
    assert router.pick(PROMPT[:64], b"", {"a": 0, "b": 1}) == "a"
    assert router.pick(PROMPT[:64], b"", {"b": 0}) == "b"
    router.remember(PROMPT[:128], b"", "b")
    assert router.pick(PROMPT, b"", {"a": 0, "b": 5}) == "b"
