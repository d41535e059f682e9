"""Conversations, and stop strings wherever they fall: both the same with and without speculation."""

from __future__ import annotations

import grpc
import pytest
from transformers import AutoTokenizer

from specdec.client import Client, Completion, chat_messages
from specdec.commands.up.cluster import Cluster
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc
from tests.support.services.faults import make_request, plain
from tests.support.services.model_pair import ModelPair

pytestmark = pytest.mark.integration

CONVERSATION = [("system", "You are terse."), ("user", "Name three colours.")]
MAX_TOKENS = 120


def chat_request(conversation: list[tuple[str, str]]) -> api.GenerateRequest:
    body = make_request(max_tokens=20, temperature=1.0)
    messages = [api.ChatMessage(role=role, content=content) for role, content in conversation]
    body.messages.CopyFrom(api.ChatMessages(messages=messages))
    return body


async def test_a_conversation_is_rendered_as_transformers_does(
    tiny_cluster: Cluster, tiny_client: Client, tiny_pair: ModelPair
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair.target)
    messages = [{"role": role, "content": content} for role, content in CONVERSATION]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    body = chat_request(CONVERSATION)
    async with grpc.aio.insecure_channel(tiny_cluster.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        tokenized = await stub.Tokenize(api.TokenizeRequest(messages=body.messages))
    assert list(tokenized.token_ids) == tokenizer.encode(rendered, add_special_tokens=False)
    as_chat = await tiny_client.complete(body)
    as_text = await tiny_client.complete(make_request(max_tokens=20, temperature=1.0, prompt=rendered))
    assert as_chat.identity == as_text.identity
    assert (await tiny_client.complete(plain(body))).identity == as_chat.identity


async def test_a_conversation_with_the_shipped_pair_is_comments_that_it_completes_as_code(
    shipped_client: Client,
) -> None:
    chat = [
        ("system", "Terse code."),
        ("user", "Add two\nnumbers."),
        ("assistant", "a + b"),
        ("user", "Multiply them."),
    ]
    rendered = "<|bos|># Terse code.\n# Add two\n# numbers.\n\na + b\n\n# Multiply them.\n\n"
    body = chat_request(chat)
    token_ids = await shipped_client.tokenize_chat(body.messages)
    assert token_ids == await shipped_client.tokenize(rendered, add_special_tokens=False)
    as_ids = make_request(max_tokens=20, temperature=1.0)
    as_ids.prompt_token_ids.token_ids.extend(token_ids)
    assert (await shipped_client.complete(body)).identity == (await shipped_client.complete(as_ids)).identity


async def test_a_code_that_was_begun_is_continued_without_a_break(shipped_client: Client) -> None:
    chat = chat_messages(
        [{"role": "user", "content": "Add two numbers."}, {"role": "assistant", "content": "def add("}],
        continue_final_message=True,
    )
    token_ids = await shipped_client.tokenize_chat(chat)
    assert await shipped_client.detokenize(token_ids) == "# Add two numbers.\n\ndef add("


async def test_what_the_template_reads_beside_the_messages_reaches_the_prompt(
    tiny_client: Client, tiny_pair: ModelPair
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair.target)
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    call = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"what": "é"}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": "it up."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "Found."},
    ]
    body = make_request(max_tokens=20, temperature=1.0)
    body.messages.CopyFrom(chat_messages(messages, tools=tools, template_variables={"voice": "low"}))
    messages[0]["content"] = "Look\nit up."  # the template takes text
    rendered = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, voice="low"
    )
    assert "é" in rendered
    assert "low" in rendered
    as_chat = await tiny_client.complete(body)
    as_text = await tiny_client.complete(make_request(max_tokens=20, temperature=1.0, prompt=rendered))
    assert as_chat.identity == as_text.identity


async def test_the_tokenizer_is_told_of_when_it_is_asked_for(tiny_client: Client, tiny_pair: ModelPair) -> None:
    assert not (await tiny_client.model_info()).HasField("tokenizer")
    info = (await tiny_client.model_info(with_tokenizer=True)).tokenizer
    tokenizer = AutoTokenizer.from_pretrained(tiny_pair.target)
    assert (info.bos_token, info.eos_token, info.pad_token) == ("<bos>", "<eos>", "<pad>")
    assert info.chat_template == tokenizer.chat_template
    assert info.vocab_size == len(tokenizer)


async def unstopped(client: Client) -> Completion:
    """What the requests below would give without a stop string."""
    return await client.complete(make_request(max_tokens=MAX_TOKENS, temperature=1.0))


def readable(text: str, start: int, length: int) -> str:
    """The first piece of the text from `start` on that is plain and stands nowhere before."""
    return next(
        piece
        for i in range(start, len(text) - length)
        if (piece := text[i : i + length]).isascii() and text.find(piece) == i
    )


async def check_stop(client: Client, stop: list[str], text: str, matched: str, keep: bool) -> None:
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0, stop=stop, include_stop_in_output=keep)
    fast, slow = await client.complete(body), await client.complete(plain(body))
    assert fast.identity == slow.identity
    for completion in (fast, slow):
        choice = completion.choices[0]
        cut = text.index(matched)
        assert choice.text == text[: cut + len(matched) if keep else cut]
        assert choice.finished is not None
        assert choice.finished.reason == pb.FINISH_REASON_STOP
        assert choice.finished.stop_string == matched
        assert len(choice.tokens) < MAX_TOKENS
        assert completion.require_finished().usage.completion_tokens == len(choice.tokens)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
async def test_a_stop_string_ends_the_text_wherever_chunks_break(tiny_client: Client, length: int, keep: bool) -> None:
    text = (await unstopped(tiny_client)).choices[0].text
    stop = readable(text, 40 if length > 1 else 0, length)
    await check_stop(tiny_client, ["never there at all", stop], text, stop, keep)


@pytest.mark.parametrize("keep", [False, True])
async def test_a_stop_string_of_many_tokens_holds_back_only_what_may_be_its_start(
    shipped_client: Client, keep: bool
) -> None:
    text = (await unstopped(shipped_client)).choices[0].text
    stop = readable(text, len(text) // 2, 12)
    await check_stop(shipped_client, [stop, stop[:6] + "\0"], text, stop, keep)


async def test_text_that_was_held_back_for_a_stop_string_comes_when_it_is_none(tiny_client: Client) -> None:
    whole = await unstopped(tiny_client)
    text = whole.choices[0].text
    almost = text[-8:] + "never"
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0, stop=[almost])
    assert (await tiny_client.complete(body)).identity == whole.identity


@pytest.mark.parametrize("keep", [False, True])
async def test_a_stop_token_ends_the_choice_the_same_with_and_without_speculation(
    tiny_client: Client, keep: bool
) -> None:
    whole = (await unstopped(tiny_client)).choices[0]
    token = whole.token_ids[60]
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0, stop_token_ids=[token], include_stop_in_output=keep)
    fast, slow = await tiny_client.complete(body), await tiny_client.complete(plain(body))
    assert fast.identity == slow.identity
    choice = fast.choices[0]
    assert choice.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert choice.finished is not None
    assert choice.finished.stop_token_id == token


async def test_no_stop_string_counts_before_min_tokens(tiny_client: Client) -> None:
    text = (await unstopped(tiny_client)).choices[0].text
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0, stop=[text[10]], min_tokens=60)
    fast, slow = await tiny_client.complete(body), await tiny_client.complete(plain(body))
    assert fast.identity == slow.identity
    assert len(fast.choices[0].tokens) >= 60
