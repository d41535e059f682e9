"""Blocks: ownership, prefix cache, copy-on-write."""

from array import array

import pytest

from specdec.engine.block_pool import BlockPool, BlockStats
from specdec.engine.errors import KVInvariantError, OutOfBlocks
from tests.support.engine.exact_runner import evict_all

PROMPT = list(range(12))


def cache_prompt(pool: BlockPool, token_ids: list[int], salt: bytes = b"") -> list[int]:
    """Blocks of a prompt that was computed, hashed and let go."""
    digests: list[bytes] = []
    num_full = len(token_ids) // pool.block_size
    pool.extend_digests(digests, token_ids, salt, num_full)
    blocks = pool.allocate(num_full)
    for block, digest in zip(blocks, digests, strict=True):
        pool.register(block, digest)
    pool.free(blocks)
    return blocks


def test_blocks_come_back_when_freed() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3
    assert pool.stats() == BlockStats(used=3, cached=0, free=1)
    pool.free(blocks)
    assert pool.stats() == BlockStats(used=0, cached=0, free=4)


def test_asking_for_too_much_hands_out_nothing() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(3)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert pool.num_free == 2


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    pool = BlockPool(2, 4)
    [block] = pool.allocate(1)
    pool.share([block])
    pool.free([block])
    assert pool._ref_counts[block] == 1
    pool.free([block])
    assert pool.num_free == 2


def test_freeing_or_sharing_a_free_block_is_a_bug() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(KVInvariantError):
        pool.free([0])
    with pytest.raises(KVInvariantError):
        pool.share([0])


def test_a_hashed_block_outlives_its_owner_and_is_found_by_prefix() -> None:
    pool = BlockPool(8, 4)
    blocks = cache_prompt(pool, PROMPT)
    assert pool.stats() == BlockStats(used=0, cached=3, free=5)
    assert pool.lookup(PROMPT) == blocks
    assert pool.lookup(PROMPT[:11]) == blocks[:2]
    assert pool.lookup(PROMPT, max_blocks=1) == blocks[:1]
    assert pool.lookup(PROMPT[:4] + [99] * 8) == blocks[:1]


def test_equal_blocks_after_different_prefixes_do_not_match() -> None:
    pool = BlockPool(8, 4)
    cache_prompt(pool, [1, 1, 1, 1, 7, 7, 7, 7])
    assert pool.lookup([2, 2, 2, 2, 7, 7, 7, 7]) == []
    assert pool.lookup([7, 7, 7, 7]) == []


def test_tenants_do_not_share_blocks() -> None:
    pool = BlockPool(8, 4)
    cache_prompt(pool, PROMPT, salt=b"a")
    assert pool.lookup(PROMPT, b"b") == []
    assert len(pool.lookup(PROMPT, b"a")) == 3


def test_digests_of_different_models_differ() -> None:
    chains: list[list[bytes]] = [[], [], []]
    for chain, (identity, salt) in zip(chains, [(b"ab", b"c"), (b"a", b"bc"), (b"", b"abc")], strict=True):
        BlockPool(1, 4, identity).extend_digests(chain, PROMPT, salt, 3)
    assert len({digest for chain in chains for digest in chain}) == 9


def test_digests_continue_where_they_stopped() -> None:
    pool = BlockPool(1, 4)
    whole: list[bytes] = []
    pool.extend_digests(whole, PROMPT, b"", 3)
    grown: list[bytes] = []
    for num_blocks in (1, 2, 3):
        pool.extend_digests(grown, PROMPT, b"", num_blocks)
    assert grown == whole


def test_eviction_takes_free_blocks_first_then_the_least_recently_used_tail() -> None:
    pool = BlockPool(6, 4)
    old, new = cache_prompt(pool, PROMPT[:8]), cache_prompt(pool, [50] * 8)
    assert set(pool.allocate(2)).isdisjoint(old + new)
    assert pool.allocate(1) == [old[1]]
    assert pool.lookup(PROMPT[:8]) == old[:1]
    pool.share(old[:1])  # used again, so the other prompt is the older one now
    pool.free(old[:1])
    assert pool.allocate(2) == [new[1], new[0]]
    assert pool.lookup(PROMPT[:8]) == old[:1]


def test_evicting_all_leaves_used_blocks_alone() -> None:
    pool = BlockPool(8, 4)
    blocks = cache_prompt(pool, PROMPT)
    pool.share(blocks[:1])
    assert evict_all(pool) == 2
    assert pool.stats() == BlockStats(used=1, cached=0, free=7)
    assert pool.lookup(PROMPT) == blocks[:1]


def test_the_second_of_two_equal_blocks_stays_unhashed() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2)
    assert pool.register(first, b"digest")
    assert not pool.register(second, b"digest")
    assert pool.register(first, b"digest")
    assert ((pool._digests[first] is not None), (pool._digests[second] is not None)) == (True, False)


def test_a_block_is_hashed_once_and_while_it_is_owned() -> None:
    pool = BlockPool(4, 4)
    [block] = pool.allocate(1)
    pool.register(block, b"one")
    with pytest.raises(KVInvariantError):
        pool.register(block, b"two")
    with pytest.raises(KVInvariantError):
        pool.register(3 if block != 3 else 2, b"three")


def test_writing_needs_an_unhashed_block_with_one_owner() -> None:
    pool = BlockPool(4, 4)
    mine, shared, hashed = pool.allocate(3)
    pool.share([shared])
    pool.register(hashed, b"digest")
    pool.check_write(mine)
    for block in (shared, hashed, ({0, 1, 2, 3} - {mine, shared, hashed}).pop()):
        assert not pool.is_writable(block)
        with pytest.raises(KVInvariantError):
            pool.check_write(block)


def test_growing_a_table_needs_no_copy() -> None:
    pool = BlockPool(4, 4)
    table = array("i")
    assert pool.num_blocks_to_write(table, 0, 9) == 3
    assert pool.ensure_writable(table, 0, 9) == []
    assert len(table) == 3
    assert pool.num_blocks_to_write(table, 9, 3) == 0
    assert pool.num_blocks_to_write(table, 9, 4) == 1
    assert pool.num_blocks_to_write(table, 9, 0) == 0


def test_writing_into_a_shared_block_copies_only_what_is_kept() -> None:
    pool = BlockPool(8, 4)
    parent = array("i", pool.allocate(3))
    child = array("i", parent)
    pool.share(child)
    # Slots 6 and 7 share a block with 4 and 5, which stay; the third block is overwritten from its start.
    assert pool.num_blocks_to_write(child, 6, 4) == 2
    assert pool.ensure_writable(child, 6, 4) == [(parent[1], child[1])]
    assert child[0] == parent[0]
    assert set(child[1:]).isdisjoint(parent)
    assert [pool._ref_counts[block] for block in parent] == [2, 1, 1]


def test_a_table_is_unchanged_when_blocks_run_out() -> None:
    pool = BlockPool(3, 4)
    parent = array("i", pool.allocate(2))
    child = array("i", parent)
    pool.share(child)
    with pytest.raises(OutOfBlocks):
        pool.ensure_writable(child, 0, 8)
    assert child == parent
    assert pool.num_free == 1


def test_a_hashed_block_is_copied_before_it_is_written_and_stays_cached() -> None:
    pool = BlockPool(3, 4)
    table = array("i", pool.allocate(1))
    pool.register(table[0], b"digest")
    [(source, destination)] = pool.ensure_writable(table, 3, 1)
    assert table[0] == destination
    assert pool._digests[source] is not None
    assert pool.stats() == BlockStats(used=1, cached=1, free=1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_a_pool_without_slots_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError):
        BlockPool(num_blocks, block_size)


def test_forgotten_blocks_are_found_by_nobody_and_stay_with_their_owners() -> None:
    pool = BlockPool(8, 4)
    blocks = cache_prompt(pool, PROMPT)
    pool.share(blocks[:2])
    pool.forget(blocks[1:])
    assert pool.lookup(PROMPT) == blocks[:1]
    assert pool.stats() == BlockStats(used=2, cached=0, free=6)
    again = cache_prompt(pool, PROMPT)
    assert not set(again) & set(blocks[:2])
    pool.free(blocks[:2])
    assert pool.lookup(PROMPT) == [blocks[0], *again[1:]]
