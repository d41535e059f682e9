"""Client to coordinator: every method, in one event loop with scripted replicas, over a real socket."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from specdec.client import chat_messages
from specdec.coordinator.intake.callers import TENANT_KEY
from specdec.coordinator.servicer import SERVICE_NAME
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.fuzz.cases import Case, Link, Run
from tests.fuzz.judge import Complaints, check_status, require, within
from tests.fuzz.mutations import mutated
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.model import identity, make_tokenizer
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    Result,
    collect,
    expected_ids,
    finish,
    request,
    running,
)

CONTEXT = 300
_BESIDE_TOKENS = 200
MOST_S = 5.0
"""For one answer of replicas without models, on a machine that is busy with something else."""
NUM_TOKENS = 6
METHODS: dict[str, type[Message]] = {
    "Generate": api.GenerateResponse,
    "Abort": api.AbortResponse,
    "Tokenize": api.TokenizeResponse,
    "Detokenize": api.DetokenizeResponse,
    "GetModelInfo": api.GetModelInfoResponse,
    "GetStatus": api.GetStatusResponse,
}
_METADATA = ("", "a", " ", "a" * 129, "a" * 4000, "0", "99999999H", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "%00")
_CHAT = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def good() -> api.GenerateRequest:
    """A request that is answered with `NUM_TOKENS` tokens, known beforehand."""
    return request(max_tokens=NUM_TOKENS)


def conversations(started: api.GenerateStarted) -> list[tuple[str, Message]]:
    """Valid calls, with all that a request can have; `started` is the first chunk of `good`."""
    sampling = {
        "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1,
        "frequency_penalty": -0.1, "logit_bias": {7: 1.5, 9: -100.0}, "min_tokens": 1, "stop": ["zzz", "yy"],
        "include_stop_in_output": True, "stop_token_ids": [99, 100], "ignore_eos": True, "n": 2, "logprobs": 2,
        "prompt_logprobs": 1, "skip_special_tokens": False, "truncate_prompt_tokens": 50,
    }  # fmt: skip
    text = {"prompt": "the quick brown fox"}
    messages = api.ChatMessages(messages=[api.ChatMessage(role="user", content="hello")])
    chat = chat_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "assistant", "content": "the quick"},
        ],
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        continue_final_message=True,
        template_variables={"enable_thinking": False},
        documents=[{"text": "d"}],
    )
    speculation = api.SpeculationParams(
        enabled=True, verify_mode=pb.VERIFY_MODE_COUPLED, max_draft_tokens=4, time_per_token_ms=9
    )
    full = request(max_tokens=4, request_id="full", model="scripted", speculation=speculation, priority=3, **sampling)
    resumed = request(max_tokens=NUM_TOKENS, request_id=started.request_id)
    resumed.resume.resume_token = started.resume_token
    resumed.resume.choices.add(index=0, token_ids=[7, 8], text_offset_bytes=1)
    return [
        ("Generate", full),
        ("Generate", request(max_tokens=3, **text, **{k: sampling[k] for k in ("stop", "n", "logit_bias")})),
        ("Generate", request(max_tokens=3, messages=messages, logprobs=1)),
        ("Generate", request(max_tokens=3, messages=chat)),
        ("Generate", resumed),
        ("Abort", api.AbortRequest(request_id="full")),
        ("Tokenize", api.TokenizeRequest(model="scripted", text="the quick brown fox", add_special_tokens=True)),
        ("Tokenize", api.TokenizeRequest(messages=messages)),
        ("Tokenize", api.TokenizeRequest(messages=chat)),
        ("Detokenize", api.DetokenizeRequest(model="scripted", token_ids=[7, 8, 9], skip_special_tokens=True)),
        ("GetModelInfo", api.GetModelInfoRequest(with_tokenizer=True)),
        ("GetStatus", api.GetStatusRequest()),
    ]


class Clients:
    """Calls a coordinator with anything, and judges its answers."""

    def __init__(self, channel: grpc.aio.Channel, valid: list[tuple[str, Message]], most_s: float = MOST_S) -> None:
        self._channel = channel
        self._valid = valid
        self._most_s = most_s

    async def try_one(self, case: Case) -> None:
        """A changed call, at times with strange metadata or to another method than it is for."""
        rng = case.rng
        method, message = rng.choice(self._valid)
        mutation = mutated(rng, message)
        if rng.random() < 0.05:
            method = rng.choice(list(METHODS))
        case.what.append(f"{method}: {mutation.what}")
        await self.call(method, case.sent(mutation.apply()), self._metadata(rng))

    async def call(self, method: str, data: bytes, metadata: Any = ()) -> str:
        """The reason of the error, empty if there was none. Raises Fault for what should not be answered."""
        path, parse = f"/{SERVICE_NAME}/{method}", METHODS[method].FromString
        try:
            if method == "Generate":
                stream: Any = self._channel.unary_stream(path, response_deserializer=parse)
                answer = stream(data, metadata=metadata)
                await within(self._most_s, _read(answer), method)
            else:
                unary: Any = self._channel.unary_unary(path, response_deserializer=parse)
                answer = unary(data, metadata=metadata)
                await within(self._most_s, answer, method)
        except grpc.aio.AioRpcError as error:
            return check_status(error.code(), error.trailing_metadata() or (), frozenset())  # type: ignore[arg-type]
        return ""

    @staticmethod
    def _metadata(rng: random.Random) -> Any:
        if rng.random() > 0.1:
            return ()
        name = rng.choice([TENANT_KEY, "traceparent", "tracestate", "authorization", "user-agent", "baggage"])
        return ((name, rng.choice(_METADATA)),)


async def _read(stream: Any) -> None:
    """Read a stream to its end; what it says must be of one piece."""
    kinds: list[str] = []
    while (chunk := await stream.read()) is not grpc.aio.EOF:
        kinds.append(chunk.WhichOneof("chunk"))
    require(kinds[:1] == ["started"] and kinds[-1:] == ["finished"], f"a stream of {kinds[:3]}...{kinds[-3:]}")


async def good_answer(harness: Harness, target: ScriptedTarget, most_s: float = MOST_S) -> api.GenerateStarted:
    """The next good request is answered with the right tokens."""
    result = await within(most_s, collect(harness.stub.Generate(good())), "a good request")
    require(result.ids() == expected_ids(target, NUM_TOKENS), f"a good request got {result.ids()}")
    assert result.started is not None
    return result.started


@asynccontextmanager
async def opened(complaints: Complaints) -> AsyncIterator[Run]:
    """A coordinator; after each case a good request, and beside all of them a stream that must not notice."""
    target, draft = short_target(), ScriptedDraft()
    async with running([target], [draft], credit_window_tokens=2) as harness:
        clients = Clients(harness.channel, conversations(await good_answer(harness, target)))
        beside = Beside(harness, target)

        async def run(case: Case) -> None:
            await clients.try_one(case)
            await good_answer(harness, target)
            await beside.go_on()

        yield run
        await beside.end()


def short_target() -> ScriptedTarget:
    """A target with a chat template and a short context, for requests that lost their max_tokens."""
    target = ScriptedTarget(identity(max_model_len=CONTEXT), tokenizer=make_tokenizer())
    target.tokenizer_config = json.dumps({"chat_template": _CHAT})
    target.tokens_per_verdict = 16
    return target


class Beside:
    """Streams that are read by and by while other things happen, and must be what they are alone."""

    def __init__(self, harness: Harness, target: ScriptedTarget) -> None:
        self._harness = harness
        self._target = target
        self._begin()

    async def go_on(self) -> None:
        """Read a chunk; at the end of a stream the next one begins."""
        chunk = await within(MOST_S, self._call.read(), "the stream beside")
        if chunk is not grpc.aio.EOF:
            self._result.add(chunk)
            return
        self._check()
        self._begin()

    async def end(self) -> None:
        """Read what is left."""
        await within(4 * MOST_S, finish(self._call, self._result), "the end of the stream beside")
        self._check()

    def _begin(self) -> None:
        self._call = self._harness.stub.Generate(request(max_tokens=_BESIDE_TOKENS, seed=5, ignore_eos=True))
        self._result = Result()

    def _check(self) -> None:
        expected = expected_ids(self._target, _BESIDE_TOKENS, seed=5)
        require(self._result.ids() == expected, "the stream beside has other tokens")


LINK = Link("client", opened)
