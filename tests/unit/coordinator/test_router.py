"""Longest known prefix first, then least load."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from specdec.coordinator.replicas.prefix_map import SharedPrefixes
from specdec.coordinator.replicas.router import PrefixRouter, block_digests
from specdec.store.memory import MemoryStore
from tests.support.cost import lines_run

PROMPT = list(range(200))
TTL_S = 60.0


def digests(token_ids: Sequence[int], salt: bytes = b"") -> list[bytes]:
    return block_digests(token_ids, salt)


def test_without_prefixes_the_least_loaded_replica_is_picked() -> None:
    assert PrefixRouter().pick(digests(PROMPT), {"a": 3, "b": 1, "c": 2}) == "b"


def test_the_replica_that_has_the_longest_prefix_is_picked_though_it_is_busier() -> None:
    router = PrefixRouter()
    assert router.pick(digests(PROMPT[:64]), {"a": 1, "b": 0}) == "b"
    assert router.pick(digests([*PROMPT[:32], *[9] * 100]), {"a": 0, "b": 5}) == "b"
    assert router.pick(digests([9] * 100), {"a": 0, "b": 5}) == "a"


def test_affinity_gives_way_to_a_large_imbalance() -> None:
    router = PrefixRouter(max_imbalance=8)
    router.pick(digests(PROMPT), {"a": 0})
    assert router.pick(digests(PROMPT), {"a": 8, "b": 0}) == "a"
    assert router.pick(digests(PROMPT), {"a": 9, "b": 0}) == "b"


def test_tenants_do_not_share_prefixes() -> None:
    router = PrefixRouter()
    router.pick(digests(PROMPT, b"one"), {"b": 0})
    assert router.pick(digests(PROMPT, b"two"), {"a": 0, "b": 0}) == "a"


def test_a_replica_that_lost_its_cache_has_no_prefixes() -> None:
    router = PrefixRouter()
    router.pick(digests(PROMPT), {"b": 0})
    router.forget("b")
    assert router.pick(digests(PROMPT), {"a": 0, "b": 0}) == "a"


def test_old_prefixes_are_forgotten_when_there_are_too_many() -> None:
    router = PrefixRouter(max_blocks=4)
    router.pick(digests(PROMPT[:64]), {"b": 0})
    router.pick(digests([7] * 128), {"b": 0})
    assert router.pick(digests(PROMPT[:64]), {"a": 0, "b": 0}) == "a"


def test_the_replica_that_wrote_an_output_is_picked_for_what_follows_it() -> None:
    router = PrefixRouter()
    assert router.pick(digests(PROMPT[:64]), {"a": 0, "b": 1}) == "a"
    assert router.pick(digests(PROMPT[:64]), {"b": 0}) == "b"
    router.remember(digests(PROMPT[:128]), "b")
    assert router.pick(digests(PROMPT), {"a": 0, "b": 5}) == "b"


def test_of_a_prefix_that_is_forgotten_for_lack_of_room_the_first_blocks_stay_longest() -> None:
    router = PrefixRouter(max_blocks=6)
    router.pick(digests(PROMPT[:128]), {"b": 0})
    router.pick(digests([7] * 128), {"c": 0})
    assert router.pick(digests(PROMPT[:64]), {"a": 0, "b": 0}) == "b"


class CountingStore(MemoryStore):
    """Counts how often it is asked for prefixes."""

    num_asked = 0

    async def prefix_holders(self, digests: Sequence[bytes]) -> list[frozenset[str]]:
        self.num_asked += 1
        return await super().prefix_holders(digests)


async def test_a_router_finds_what_another_one_remembered() -> None:
    store = MemoryStore()
    first, second = SharedPrefixes(store, TTL_S), SharedPrefixes(store, TTL_S)
    turn_1, turn_2 = digests(PROMPT[:100]), digests(PROMPT)
    PrefixRouter(shared=first).remember(turn_1, "b")
    await first.flush()
    router = PrefixRouter(shared=second)
    known = await router.ask_others(turn_2, ["a", "b"])
    assert known == {"b": 3}
    assert router.pick(turn_2, {"a": 0, "b": 2}, known) == "b"


async def test_the_longest_prefix_wins_whoever_knows_of_it() -> None:
    store = MemoryStore()
    shared = SharedPrefixes(store, TTL_S)
    PrefixRouter(shared=shared).remember(digests(PROMPT[:96]), "b")
    await shared.flush()
    router = PrefixRouter(shared=SharedPrefixes(store, TTL_S))
    router.remember(digests(PROMPT[:160]), "a")
    known = await router.ask_others(digests(PROMPT), ["a", "b"])
    assert router.pick(digests(PROMPT), {"a": 5, "b": 0}, known) == "a"


async def test_others_are_asked_only_when_their_answer_can_matter() -> None:
    store = CountingStore()
    router = PrefixRouter(shared=SharedPrefixes(store, TTL_S))
    prompt = digests(PROMPT)
    assert await router.ask_others(prompt, ["a"]) == {}
    assert await router.ask_others(digests(PROMPT[:31]), ["a", "b"]) == {}
    router.remember(prompt, "a")
    assert await router.ask_others(prompt, ["a", "b"]) == {}
    assert await PrefixRouter().ask_others(prompt, ["a", "b"]) == {}
    assert store.num_asked == 0
    assert await router.ask_others(digests([*PROMPT, *PROMPT]), ["a", "b"]) == {}
    assert store.num_asked == 1


@given(num_known=st.integers(0, 6), num_tokens=st.integers(192, 300))
def test_digests_go_on_behind_those_that_are_known(num_known: int, num_tokens: int) -> None:
    tokens = list(range(num_tokens))
    digests = block_digests(tokens, b"salt")
    assert block_digests(tokens, b"salt", digests[:num_known]) == digests


def test_the_digests_of_a_prompt_are_computed_once_for_all_choices() -> None:
    tokens = list(range(32_000))
    known = block_digests(tokens, b"salt")
    assert lines_run(lambda: block_digests([*tokens, *range(64)], b"salt", known)) < 20
