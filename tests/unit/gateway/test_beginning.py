"""The key of a chat: the same in each of its turns, another one for other chats, callers and salts."""

from __future__ import annotations

import json

import pytest

from specdec.gateway.upstream.beginning import key_of
from specdec.v1 import coordinator_pb2 as api
from tests.support.cost import lines_run

Message = tuple[str, str]
SYSTEM: Message = ("system", "You are helpful. " * 500)
FIRST: list[Message] = [SYSTEM, ("user", "What is a coordinator?")]
LATER: list[Message] = [*FIRST, ("assistant", "A service."), ("user", "Of what?"), ("tool", "{}"), ("user", "Thanks")]


def chat(messages: list[Message], salt: str = "") -> api.GenerateRequest:
    told = [api.ChatMessage(role=role, content=content) for role, content in messages]
    return api.GenerateRequest(messages=api.ChatMessages(messages=told), cache_salt=salt)


def test_all_turns_of_a_chat_have_one_key() -> None:
    resumed = chat(LATER)
    resumed.request_id, resumed.sampling.seed = "r", 7
    resumed.resume.resume_token = b"x"
    turns = [chat(FIRST), chat(LATER[:4]), chat(LATER), resumed]
    key = ("authorization", "Bearer a")
    assert len({key_of(turn, (key, ("traceparent", str(n)))) for n, turn in enumerate(turns)}) == 1


def test_parts_of_a_content_count_as_its_text_does() -> None:
    def parts(text: str) -> api.GenerateRequest:
        message = api.ChatMessage(role="user", fields_json=json.dumps({"content": [{"type": "text", "text": text}]}))
        return api.GenerateRequest(messages=api.ChatMessages(messages=[message]))

    assert key_of(parts("a"), ()) == key_of(parts("a"), ()) != key_of(parts("b"), ())


def test_other_chats_callers_and_salts_have_other_keys() -> None:
    others = [
        (chat(FIRST), ()),
        (chat([SYSTEM, ("user", "What is a target?")]), ()),
        (chat([("user", "What is a coordinator?")]), ()),
        (chat([("user", SYSTEM[1]), ("user", "What is a coordinator?")]), ()),
        (chat(FIRST, "salt"), ()),
        (chat(FIRST), (("authorization", "Bearer a"),)),
        (chat(FIRST), (("authorization", "Bearer b"),)),
        (chat(FIRST), (("specdec-tenant", "a"),)),
        (chat([]), ()),
    ]
    assert len({key_of(request, metadata) for request, metadata in others}) == len(others)


@pytest.mark.parametrize(
    "prompts",
    [
        [api.GenerateRequest(prompt="x" * 1024 + end) for end in ("", "a", "b" * 5000)],
        [api.GenerateRequest(prompt_token_ids=api.TokenIds(token_ids=[7] * 256 + [n] * n)) for n in (0, 1, 300)],
    ],
    ids=["text", "ids"],
)
def test_prompts_with_one_beginning_have_one_key(prompts: list[api.GenerateRequest]) -> None:
    assert len({key_of(prompt, ()) for prompt in prompts}) == 1
    other = api.GenerateRequest(prompt="y", prompt_token_ids=None)
    assert key_of(other, ()) not in {key_of(prompt, ()) for prompt in prompts}


@pytest.mark.parametrize(
    "request_",
    [
        api.GenerateRequest(),
        api.GenerateRequest(prompt="\ud7ff\0" * 10),
        chat([("system", "a")] * 20_000),
        chat([("", "")] * 3),
        api.GenerateRequest(prompt_token_ids=api.TokenIds(token_ids=[2**32 - 1] * 1_000_000)),
    ],
    ids=["empty", "text", "messages", "no roles", "ids"],
)
def test_extreme_requests_have_a_key_at_little_cost(request_: api.GenerateRequest) -> None:
    keys: list[int] = []
    assert lines_run(lambda: keys.append(key_of(request_, ()))) < 100
    assert 0 <= keys[0] < 2**64
