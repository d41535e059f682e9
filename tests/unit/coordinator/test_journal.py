"""The journal and the shared quotas on a store that can go away."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from coordinator.intake.resume import check_params, encode_params
from coordinator.journal import Journal
from coordinator.journal.upkeep import BATCH_TOKENS, JournalSettings
from coordinator.sessions.client_stream import ClientStream
from coordinator.sessions.session import Request, Session
from coordinator.tenants.quotas import QuotaRate
from coordinator.tenants.shared_quotas import SharedQuotas
from coordinator.text.choice_output import ChoiceOutput
from coordinator.text.detokenizer import DetokenizerFactory
from specdec.backoff import Backoff
from specdec.rpc.errors import InvalidRequest, Overloaded
from specdec.store.errors import StoreUnavailable
from specdec.store.guarded import GuardedStore
from specdec.store.interface import Appended, Begun, JournalWrite, Lease, NewRequest, RequestKey
from specdec.store.memory import MemoryStore
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.services.faults import eventually
from tests.support.services.scripted_replicas import make_tokenizer

KEY = RequestKey("a", "mine")
PROMPT = [1, 2, 3]
RATE = QuotaRate(tokens_per_s=0.001, burst_tokens=100.0)


class Store(MemoryStore):
    """Keeps what it has while it is away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.answers = asyncio.Event()
        """Whether those who take tokens get an answer."""
        self.answers.set()
        self.num_asked = 0
        """For tokens."""
        self.batches: list[int] = []
        """Tokens of each append."""
        self.num_leases: list[int] = []
        """Of each renewal."""
        self.may_begin: dict[str, asyncio.Event] = {}
        """By owner: begins when this is set."""
        self.begun: list[str] = []
        """Owners, in the order in which the store heard of them."""

    async def begin(self, key: RequestKey, request: NewRequest) -> Begun:
        self._check()
        if (may_begin := self.may_begin.get(request.owner_id)) is not None:
            await may_begin.wait()
        self.begun.append(request.owner_id)
        return await super().begin(key, request)

    async def append(self, writes: Sequence[JournalWrite]) -> list[Appended]:
        self._check()
        self.batches.append(sum(len(write.token_ids) for write in writes))
        return await super().append(writes)

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        self._check()
        self.num_leases.append(len(leases))
        return await super().renew(leases)

    def snapshot(self) -> Callable[[], None]:
        """What is in the store; calling it brings that back."""
        kept = copy.deepcopy(self._state)

        def restore() -> None:
            self._state = kept

        return restore

    async def end(self, key: RequestKey, owner_id: str, generation: int, keep_s: float) -> bool:
        self._check()
        return await super().end(key, owner_id, generation, keep_s)

    async def take_tokens(
        self, bucket: str, amount: float, rate_per_s: float, burst: float, force: bool = False
    ) -> float:
        self._check()
        self.num_asked += 1
        await self.answers.wait()
        return await super().take_tokens(bucket, amount, rate_per_s, burst, force)

    async def ping(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.is_away:
            raise StoreUnavailable("away")


def guarded(store: Store) -> GuardedStore:
    return GuardedStore(store, backoff=Backoff(first_s=0.001, longest_s=0.01))


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def shared(store: Store) -> GuardedStore:
    return guarded(store)


def make_journal(
    store: GuardedStore,
    taken_over: list[Request] | None = None,
    aborted: list[Request] | None = None,
    *,
    lease_s: float = 10.0,
) -> Journal:
    """A journal that writes at once. The lists are of the requests that it says were taken over, or aborted."""
    return Journal(
        store,
        "one",
        JournalSettings(lease_s=lease_s, interval_s=0.001, retry_s=0.001),
        on_unjournalled=lambda num: None,
        on_taken_over=([] if taken_over is None else taken_over).append,
        on_aborted=([] if aborted is None else aborted).append,
    )


@pytest.fixture
def taken_over() -> list[Request]:
    """What `journal` says was taken over."""
    return []


@pytest.fixture
def aborted() -> list[Request]:
    """What `journal` says was aborted elsewhere."""
    return []


@pytest.fixture
async def journal(shared: GuardedStore, taken_over: list[Request], aborted: list[Request]) -> AsyncIterator[Journal]:
    journal = make_journal(shared, taken_over, aborted)
    journal.start()
    yield journal
    await journal.close()


def request(key: RequestKey = KEY, uid: str = "uid") -> Request:
    return Request(key, uid, ClientStream(), 0.0, pb.ModelIdentity())


async def begin(journal: Journal, request: Request, num_choices: int = 1, take_over: bool = False) -> None:
    await journal.begin(request, seed=7, params=b"", num_choices=num_choices, take_over=take_over)
    detokenizers = DetokenizerFactory(make_tokenizer())
    sessions = [
        Session(
            session_id=f"one/uid/{choice}",
            choice=choice,
            request=request,
            token_ids=list(PROMPT),
            num_prompt_tokens=len(PROMPT),
            sampling=pb.TokenSampling(),
            verify_mode=pb.VERIFY_MODE_COUPLED,
            speculate=False,
            output=ChoiceOutput(detokenizers.create(True)),
            detokenizers=detokenizers,
        )
        for choice in range(num_choices)
    ]
    request.start(sessions)


def decode(journal: Journal, session: Session, token_ids: Sequence[int]) -> None:
    session.token_ids.extend(token_ids)
    journal.append(session, [pb.ORIGIN_DECODE] * len(token_ids))


async def journal_has(store: Store, token_ids: Sequence[int]) -> None:
    async def has() -> bool:
        record = await store.load(KEY)
        return record is not None and list(record.token_ids[0]) == list(token_ids)

    await eventually(has, "the store has the tokens")


async def until_up(shared: GuardedStore, is_up: bool) -> None:
    async def is_so() -> bool:
        return shared.is_up is is_up

    await eventually(is_so, f"the store is {'up' if is_up else 'down'}")


async def test_what_came_while_the_store_was_away_is_written_in_batches_when_it_is_back(
    store: Store, shared: GuardedStore, journal: Journal
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
    store: Store, journal: Journal
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


async def test_an_end_that_the_store_missed_is_told_when_it_is_back(store: Store, journal: Journal) -> None:
    await begin(journal, ours := request())
    store.is_away = True
    await journal.end(ours)
    store.is_away = False

    async def has_ended() -> bool:
        record = await store.load(KEY)
        return record is not None and record.is_ended

    await eventually(has_ended, "the request has ended in the store")


async def test_two_that_began_the_same_while_the_store_was_away_both_go_on(
    store: Store, shared: GuardedStore, journal: Journal, taken_over: list[Request]
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
    store: Store, journal: Journal, taken_over: list[Request]
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
    store: Store, journal: Journal, taken_over: list[Request], has_ended: bool
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


async def test_what_does_not_fit_into_one_batch_is_written_by_the_next_without_a_new_token(
    store: Store, shared: GuardedStore
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
    store: Store, shared: GuardedStore
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


async def test_of_two_streams_of_one_request_that_begin_at_once_the_later_one_has_it(
    store: Store, journal: Journal
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
    store: Store, shared: GuardedStore
) -> None:
    journal = make_journal(shared, lease_s=0.05)
    journal.start()
    dead = await store.begin(KEY, NewRequest("two/uid", 7, b"", 1, lease_s=0.2))
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


async def test_a_resume_that_joins_late_takes_nothing_from_a_later_resume(store: Store, shared: GuardedStore) -> None:
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
    store: Store, journal: Journal, aborted: list[Request]
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
    store: Store, journal: Journal
) -> None:
    await begin(journal, ours := request())
    assert await store.abort(KEY)
    decode(journal, ours.sessions[0], [4])
    await journal.end(ours)
    record = await store.load(KEY)
    assert record is not None
    assert record.is_ended


async def test_an_end_that_leaves_much_to_write_writes_all_of_it(store: Store, shared: GuardedStore) -> None:
    journal = make_journal(shared)  # that is not started writes nothing before the end
    await begin(journal, ours := request())
    decode(journal, ours.sessions[0], tokens := list(range(40_000)))
    await journal.end(ours)
    record = await store.load(KEY)
    assert record is not None
    assert record.is_ended
    assert list(record.token_ids[0]) == tokens


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


async def test_a_request_that_the_store_does_not_take_runs_without_it(store: Store, journal: Journal) -> None:
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


async def test_tokens_are_counted_over_coordinators_and_given_back(store: Store) -> None:
    one, two = SharedQuotas(guarded(store)), SharedQuotas(guarded(store))
    await one.admit("a", RATE, 60)
    await two.admit("a", RATE, 40)
    for quotas in (one, two):
        with pytest.raises(Overloaded) as caught:
            await quotas.admit("a", RATE, 1)
        assert caught.value.reason == "QUOTA_EXCEEDED"
        assert caught.value.retry_after_s == pytest.approx(1000, abs=1)
    two.charge("a", RATE, -40)
    await two.close()
    await one.admit("a", RATE, 39)
    await one.admit("b", RATE, 100)


async def test_what_is_used_up_to_the_end_is_counted_for_all_tenants(store: Store) -> None:
    quotas = SharedQuotas(guarded(store))
    quotas.start()
    for tenant in ("a", "b", "c"):
        quotas.charge(tenant, RATE, 100)
    store.answers.clear()

    async def is_asked() -> bool:
        return store.num_asked == 1

    await eventually(is_asked, "the store is told of the first")
    closing = asyncio.create_task(quotas.close())

    async def is_asked_again() -> bool:
        return store.num_asked == 2

    await eventually(is_asked_again, "the task has ended, and the rest is told")
    store.answers.set()
    await closing
    # What was under way may or may not have taken effect.
    empty = [tenant for tenant in ("a", "b", "c") if await store.take_tokens(tenant, 1, 0.001, 100.0) > 0]
    assert len(empty) == 2


async def test_while_the_store_is_away_each_counts_for_itself_and_that_is_forgotten_when_it_is_back(
    store: Store, shared: GuardedStore
) -> None:
    quotas = SharedQuotas(shared)
    await quotas.admit("a", RATE, 60)
    store.is_away = True
    await quotas.admit("a", RATE, 30)
    quotas.charge("a", RATE, 20)
    with pytest.raises(Overloaded):
        await quotas.admit("a", RATE, 1)
    store.is_away = False

    async def is_back() -> bool:
        with contextlib.suppress(StoreUnavailable):
            await shared.ping()
        return shared.is_up

    await eventually(is_back, "the store is back")
    await quotas.admit("a", RATE, 40)
    with pytest.raises(Overloaded):
        await quotas.admit("a", RATE, 1)


async def test_what_of_one_tenant_cannot_be_counted_does_not_keep_the_others_from_it(store: Store) -> None:
    quotas = SharedQuotas(guarded(store))
    quotas.start()
    quotas.charge("b", RATE, 100)
    quotas.charge("a", QuotaRate(tokens_per_s=float("inf"), burst_tokens=100.0), 100)

    async def is_counted() -> bool:
        return await store.take_tokens("b", 1, 0.001, 100.0) > 0

    await eventually(is_counted, "the tokens of b are counted")
    await quotas.close()
