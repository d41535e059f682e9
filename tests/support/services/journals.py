"""Journals of requests with made-up tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from specdec.coordinator.journal import Journal
from specdec.coordinator.journal.upkeep import JournalSettings
from specdec.coordinator.sessions.client_stream import ClientStream
from specdec.coordinator.sessions.session import Request, Session
from specdec.coordinator.text.choice_output import ChoiceOutput
from specdec.coordinator.text.detokenizer import DetokenizerFactory
from specdec.store.guarded import GuardedStore
from specdec.store.interface import RequestKey
from specdec.v1 import common_pb2 as pb
from tests.support.scripted.model import make_tokenizer
from tests.support.services.departing_store import DepartingStore
from tests.support.services.faults import eventually

KEY = RequestKey("a", "mine")
PROMPT = [1, 2, 3]


def make_journal(
    store: GuardedStore,
    taken_over: list[Request] | None = None,
    aborted: list[Request] | None = None,
    *,
    lease_s: float = 10.0,
) -> Journal:
    """A journal that writes at once. It appends taken-over and aborted requests to the lists."""
    return Journal(
        store,
        "one",
        JournalSettings(lease_s=lease_s, interval_s=0.001, retry_s=0.001),
        on_unjournalled=lambda num: None,
        on_taken_over=([] if taken_over is None else taken_over).append,
        on_aborted=([] if aborted is None else aborted).append,
    )


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
            token_ids=array("I", PROMPT),
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


async def journal_has(store: DepartingStore, token_ids: Sequence[int]) -> None:
    async def has() -> bool:
        record = await store.load(KEY)
        return record is not None and list(record.token_ids[0]) == list(token_ids)

    await eventually(has, "the store has the tokens")


async def until_up(shared: GuardedStore, is_up: bool) -> None:
    async def is_so() -> bool:
        return shared.is_up is is_up

    await eventually(is_so, f"the store is {'up' if is_up else 'down'}")
