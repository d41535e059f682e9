"""Whose a request is, by the journal, when others begin, resume, take over or abort it; on a store that can go away."""

from __future__ import annotations

import asyncio

import pytest

from specdec.coordinator.journal import Journal
from specdec.coordinator.sessions.session import Request
from specdec.store.guarded import GuardedStore
from specdec.store.interface import Lease, NewRequest
from tests.support.services.departing_store import DepartingStore
from tests.support.services.faults import eventually
from tests.support.services.journals import KEY, begin, decode, journal_has, make_journal, request, until_up


async def test_two_that_began_the_same_while_the_store_was_away_both_go_on(
    store: DepartingStore, shared: GuardedStore, journal: Journal, taken_over: list[Request]
) -> None:
    store.is_away = True
    await begin(journal, ours := request())
    store.is_away = False
    other = NewRequest("two/uid", 7, b"", 1, lease_s=30.0)
    await store.begin(KEY, other)
    decode(journal, ours.sessions[0], [4])
    await until_up(shared, True)
    assert journal.num_unjournalled == 1
    assert taken_over == []
    record = await store.load(KEY)
    assert record is not None
    assert record.owner_id == "two/uid"


async def test_a_request_that_another_took_over_is_told_so_once(
    store: DepartingStore, journal: Journal, taken_over: list[Request]
) -> None:
    await begin(journal, ours := request())
    await store.begin(KEY, NewRequest("two/uid", 7, b"", 1, lease_s=30.0, take_over=True))
    decode(journal, ours.sessions[0], [4])

    async def is_told() -> bool:
        return bool(taken_over)

    await eventually(is_told, "the request is taken over")
    decode(journal, ours.sessions[0], [5])
    await journal.end(ours)
    assert taken_over == [ours]
    record = await store.load(KEY)
    assert record is not None
    assert not record.is_ended
    assert record.token_ids == ((),)


@pytest.mark.parametrize("has_ended", [True, False])
async def test_a_request_whose_beginning_the_store_forgot_in_favour_of_what_was_there_before_goes_on(
    store: DepartingStore, journal: Journal, taken_over: list[Request], has_ended: bool
) -> None:
    former = await store.begin(KEY, NewRequest("two/uid", 7, b"", 1, lease_s=30.0))
    if has_ended:
        await store.end(KEY, "two/uid", former.generation, 300.0)
    fail_over = store.snapshot()
    ours = request()
    await begin(journal, ours, take_over=True)
    decode(journal, ours.sessions[0], [4])
    await journal_has(store, [4])
    fail_over()
    decode(journal, ours.sessions[0], [5])
    await journal_has(store, [4, 5])
    assert taken_over == []
    assert journal.num_unjournalled == 0
    record = await store.load(KEY)
    assert record is not None
    assert record.owner_id == "one/uid"


async def test_of_two_streams_of_one_request_that_begin_at_once_the_later_one_has_it(
    store: DepartingStore, journal: Journal
) -> None:
    former, later = request(), request()
    later.uid = "later"
    store.may_begin["one/uid"] = asyncio.Event()
    beginning = [asyncio.create_task(begin(journal, one, take_over=True)) for one in (former, later)]
    for _ in range(50):  # turns of the loop, in which the later one would reach the store if it did not wait
        await asyncio.sleep(0)
    store.may_begin["one/uid"].set()
    await asyncio.gather(*beginning)
    assert store.begun == ["one/uid", "one/later"]
    record = await store.load(KEY)
    assert record is not None
    assert record.owner_id == "one/later"


async def test_a_resume_that_began_while_the_store_was_away_joins_when_the_lease_of_its_former_owner_is_over(
    store: DepartingStore, shared: GuardedStore
) -> None:
    journal = make_journal(shared, lease_s=0.05)
    journal.start()
    dead = await store.begin(KEY, NewRequest("two/uid", 7, b"", 1, lease_s=1.0))
    store.is_away = True
    await begin(journal, ours := request(), take_over=True)
    decode(journal, ours.sessions[0], [4])
    store.is_away = False
    await until_up(shared, True)
    assert (await store.load(KEY)) is not None
    await journal_has(store, [4])
    record = await store.load(KEY)
    assert record is not None
    assert (record.owner_id, record.generation > dead.generation) == ("one/uid", True)
    await journal.close()


async def test_a_resume_that_joins_late_takes_nothing_from_a_later_resume(
    store: DepartingStore, shared: GuardedStore
) -> None:
    journal = make_journal(shared, lease_s=0.02)
    journal.start()
    store.is_away = True
    await begin(journal, ours := request(), take_over=True)
    store.is_away = False
    later = await store.begin(KEY, NewRequest("two/uid", 7, b"", 1, lease_s=600.0, take_over=True))
    decode(journal, ours.sessions[0], [4])

    async def has_tried_again() -> bool:
        return store.begun.count("one/uid") >= 3

    await eventually(has_tried_again, "it has tried to join")
    assert await store.renew([Lease(KEY, "two/uid", later.generation)]) == [True]
    await journal.close()


async def test_a_request_that_was_aborted_elsewhere_is_told_so_once_and_its_id_is_free_when_it_has_ended(
    store: DepartingStore, journal: Journal, aborted: list[Request]
) -> None:
    await begin(journal, ours := request())
    assert await store.abort(KEY)
    decode(journal, ours.sessions[0], [4])

    async def is_told() -> bool:
        return bool(aborted)

    await eventually(is_told, "the request is aborted")
    decode(journal, ours.sessions[0], [5])
    await journal.end(ours)
    assert aborted == [ours]
    record = await store.load(KEY)
    assert record is not None
    assert record.is_ended


async def test_a_request_that_ends_before_it_learns_of_its_abort_leaves_its_id_free(
    store: DepartingStore, journal: Journal
) -> None:
    await begin(journal, ours := request())
    assert await store.abort(KEY)
    decode(journal, ours.sessions[0], [4])
    await journal.end(ours)
    record = await store.load(KEY)
    assert record is not None
    assert record.is_ended


async def test_of_two_streams_of_a_request_in_one_process_the_later_is_loaded(journal: Journal) -> None:
    await begin(journal, former := request())
    decode(journal, former.sessions[0], [4])
    later = request()
    later.uid = "later"
    await journal.begin(later, seed=7, params=b"", num_choices=1, take_over=True)
    later.start(former.sessions)
    journal.append(later.sessions[0], [])
    record = await journal.load(KEY)
    assert record is not None
    assert record.owner_id == "one/later"
