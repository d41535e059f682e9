"""The journal on a store that can go away: what is written, when, and in what portions."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.coordinator.intake.resume import check_params, encode_params
from specdec.coordinator.journal import Journal
from specdec.coordinator.journal.upkeep import BATCH_TOKENS
from specdec.store.guarded import GuardedStore
from specdec.store.interface import RequestKey, StoreUnavailable
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from tests.support.services.departing_store import DepartingStore
from tests.support.services.faults import eventually
from tests.support.services.journals import KEY, PROMPT, begin, decode, journal_has, make_journal, request, until_up


async def test_what_came_while_the_store_was_away_is_written_in_batches_when_it_is_back(
    store: DepartingStore, shared: GuardedStore, journal: Journal
) -> None:
    await begin(journal, ours := request())
    decode(journal, ours.sessions[0], [4, 5])
    await journal_has(store, [4, 5])
    store.is_away = True
    tokens = [4, 5, *range(40_000)]
    decode(journal, ours.sessions[0], tokens[2:])
    await until_up(shared, False)
    store.batches.clear()
    store.is_away = False
    await journal_has(store, tokens)
    assert len(store.batches) == 3
    assert sum(store.batches) == 40_000


async def test_a_request_that_began_while_the_store_was_away_joins_when_it_is_back(
    store: DepartingStore, journal: Journal
) -> None:
    store.is_away = True
    await begin(journal, ours := request(), num_choices=2)
    decode(journal, ours.sessions[0], [4, 5])
    decode(journal, ours.sessions[1], [6])
    assert journal.num_unjournalled == 1
    store.is_away = False
    await journal_has(store, [4, 5])
    record = await store.load(KEY)
    assert record is not None
    assert record.token_ids == ((4, 5), (6,))
    assert journal.num_unjournalled == 0


async def test_an_end_that_the_store_missed_is_told_when_it_is_back(store: DepartingStore, journal: Journal) -> None:
    await begin(journal, ours := request())
    store.is_away = True
    await journal.end(ours)
    store.is_away = False

    async def has_ended() -> bool:
        record = await store.load(KEY)
        return record is not None and record.is_ended

    await eventually(has_ended, "the request has ended in the store")


async def test_what_does_not_fit_into_one_batch_is_written_by_the_next_without_a_new_token(
    store: DepartingStore, shared: GuardedStore
) -> None:
    journal = make_journal(shared)
    others = [request(RequestKey("a", f"other {number}"), f"uid {number}") for number in range(2)]
    for other, num_tokens in zip(others, (BATCH_TOKENS, 3), strict=True):
        await begin(journal, other)
        decode(journal, other.sessions[0], list(range(num_tokens)))
    journal.start()

    async def is_written() -> bool:
        record = await store.load(others[1].key)
        return record is not None and record.token_ids == ((0, 1, 2),)

    await eventually(is_written, "the second request's tokens are there")
    await journal.close()
    assert store.batches == [BATCH_TOKENS, 3]


async def test_thousands_of_requests_are_written_and_renewed_in_bounded_batches(
    store: DepartingStore, shared: GuardedStore
) -> None:
    journal = make_journal(shared, lease_s=0.01)
    requests = [request(RequestKey("a", f"{number}"), f"{number}") for number in range(1200)]
    for one in requests:
        await begin(journal, one)
        decode(journal, one.sessions[0], [4])
    journal.start()

    async def are_all_there() -> bool:
        return sum(store.batches) == sum(store.num_leases[:3]) == 1200

    await eventually(are_all_there, "all tokens are written, and all leases renewed")
    await journal.close()
    assert max(store.batches) <= 512
    assert max(store.num_leases) <= 512


async def test_an_end_that_leaves_much_to_write_writes_all_of_it(store: DepartingStore, shared: GuardedStore) -> None:
    journal = make_journal(shared)  # that is not started writes nothing before the end
    await begin(journal, ours := request())
    decode(journal, ours.sessions[0], tokens := list(range(40_000)))
    await journal.end(ours)
    record = await store.load(KEY)
    assert record is not None
    assert record.is_ended
    assert list(record.token_ids[0]) == tokens


async def test_a_request_that_the_store_does_not_take_runs_without_it(store: DepartingStore, journal: Journal) -> None:
    await begin(journal, ours := request(), num_choices=1000)
    decode(journal, ours.sessions[0], [4])
    assert journal.num_unjournalled == 1
    record = await journal.load(KEY)
    assert record is not None
    assert record.token_ids[0] == (4,)
    await journal.end(ours)
    assert journal.num_unjournalled == 0
    assert await store.load(KEY) is None


def test_the_first_parameter_that_differs_is_named() -> None:
    body = api.GenerateRequest(prompt="a", request_id="x")
    body.sampling.top_k = 0
    before = encode_params(body, PROMPT, 7)
    check_params(before, before, "prompt")
    body.request_id, body.priority = "y", 3
    check_params(before, encode_params(body, PROMPT, 7), "prompt")
    body.sampling.ClearField("top_k")
    for field, given in {
        "sampling.top_k": encode_params(body, PROMPT, 7),
        "sampling.seed": encode_params(api.GenerateRequest(sampling={"top_k": 0}), PROMPT, 8),
        "prompt": encode_params(body, [1, 2], 7),
    }.items():
        with pytest.raises(InvalidRequest) as caught:
            check_params(before, given, "prompt")
        assert caught.value.field == field


async def test_an_end_that_the_store_cannot_take_keeps_no_other_request_from_being_journalled(
    store: DepartingStore, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that another program has spoilt, say."""
    end = store.end
    spoilt = request(RequestKey("a", "spoilt"), "spoilt")

    async def end_others(key: RequestKey, *rest: Any) -> None:
        if key == spoilt.key:
            raise StoreUnavailable("this record is no record")
        await end(key, *rest)

    monkeypatch.setattr(store, "end", end_others)
    await begin(journal, spoilt)
    await journal.end(spoilt)
    await begin(journal, ours := request())
    decode(journal, ours.sessions[0], [4, 5])
    await journal_has(store, [4, 5])
