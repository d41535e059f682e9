"""Which replicas each coordinator of many is attached to: all are, equally, and changes move little."""

from __future__ import annotations

from collections import Counter

from specdec.coordinator.replicas.subset import Subset

COORDINATORS = [f"10.0.0.{number}:50051" for number in range(100)]
REPLICAS = [f"10.1.{number // 250}.{number % 250}:50052" for number in range(1000)]


def chosen(
    own: str, coordinators: list[str] = COORDINATORS, replicas: list[str] = REPLICAS, size: int | None = 32
) -> list[str]:
    return list(Subset(size, lambda: 0.0).chosen(own, coordinators, replicas))


def test_every_replica_has_the_same_number_of_coordinators_but_for_one() -> None:
    subsets = [chosen(own) for own in COORDINATORS]
    count = Counter(name for subset in subsets for name in subset)
    assert set(count) == set(REPLICAS)
    assert max(count.values()) - min(count.values()) <= 1
    sizes = [len(subset) for subset in subsets]
    assert 31 < sum(sizes) / len(sizes) < 33
    # Six standard deviations of a binomial distribution: 100 coordinators exceed them once in a million lists.
    assert min(sizes) > 32 - 6 * 5.6 and max(sizes) < 32 + 6 * 5.6


def test_a_few_coordinators_leave_no_replica_out_and_one_of_them_may_be_lost() -> None:
    for num in (2, 3, 10):
        coordinators = COORDINATORS[:num]
        count = Counter(name for own in coordinators for name in chosen(own, coordinators))
        assert {count[name] for name in REPLICAS} == {max(2, round(32 * num / 1000))}


def test_small_fleets_and_coordinators_that_know_no_others_use_all_replicas() -> None:
    assert chosen(COORDINATORS[0], replicas=REPLICAS[:32]) == REPLICAS[:32]
    assert chosen(COORDINATORS[0], size=None) == REPLICAS
    assert chosen(COORDINATORS[0], [], REPLICAS) == REPLICAS
    assert chosen(COORDINATORS[0], COORDINATORS[:1]) == REPLICAS
    assert chosen("", COORDINATORS) == REPLICAS
    assert chosen(COORDINATORS[0], replicas=[]) == []


def test_a_replica_that_comes_or_goes_moves_few_links_of_others() -> None:
    before = REPLICAS[:-1]
    moved = [set(chosen(own, replicas=before)) ^ (set(chosen(own)) & set(before)) for own in COORDINATORS[:10]]
    assert sum(map(len, moved)) <= 4, "only the links by which the average sinks"


def test_a_coordinator_that_goes_leaves_its_replicas_to_others_and_nothing_else_moves() -> None:
    gone, left = COORDINATORS[0], COORDINATORS[1:]
    for own in left[:10]:
        before, after = set(chosen(own)), set(chosen(own, left))
        # Each replica may have one coordinator fewer, as 32 replicas of 99 coordinators are fewer links.
        assert after - before <= set(chosen(gone))
        assert len(before - after) <= 4


def test_the_same_lists_in_another_order_and_asked_again_give_the_same_replicas() -> None:
    subset = Subset(32, lambda: 0.0)
    first = list(subset.chosen(COORDINATORS[3], COORDINATORS, REPLICAS))
    assert list(subset.chosen(COORDINATORS[3], COORDINATORS[::-1], REPLICAS)) == first
    assert list(subset.chosen(COORDINATORS[3], COORDINATORS, REPLICAS[:500])) == chosen(
        COORDINATORS[3], replicas=REPLICAS[:500]
    )
    assert list(subset.chosen(COORDINATORS[3], COORDINATORS, REPLICAS)) == first


def test_coordinators_that_vanish_together_count_for_a_while() -> None:
    """A Redis that was emptied names nobody: nobody attaches to the whole fleet meanwhile."""
    now_s = 0.0
    subset = Subset(32, lambda: now_s)
    first = list(subset.chosen(COORDINATORS[0], COORDINATORS, REPLICAS))
    now_s = 29.0
    assert list(subset.chosen(COORDINATORS[0], [], REPLICAS)) == first
    now_s = 31.0
    assert list(subset.chosen(COORDINATORS[0], [], REPLICAS)) == REPLICAS


def test_names_may_be_anything() -> None:
    odd = ["", "\udc80", "x" * 10_000]
    assert set(chosen("a", ["a", *odd], [*odd, *REPLICAS], 8)) <= {*odd, *REPLICAS}
