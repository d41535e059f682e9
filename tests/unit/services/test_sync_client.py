"""The client for plain functions: answers, errors and ends are those of the client for asyncio."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from specdec.client import Client, ClientSettings, Completion, ResumePolicy, SyncClient, chat_messages
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc
from specdec.wire.errors import Cancelled, InvalidRequest, ModelNotFound, Overloaded, Unavailable, to_status
from tests.support.for_each import for_each
from tests.support.services.fake_coordinator import TEXT, FakeCoordinator, running_fake_coordinator

PATIENCE_S = 60.0
LEAVES_A_STREAM_OPEN = """
import sys
from specdec.client import SyncClient
from specdec.v1 import coordinator_pb2
client = SyncClient(sys.argv[1])
stream = client.generate(coordinator_pb2.GenerateRequest(prompt="p"))
print(next(stream).started.request_id)
"""


class OpenEnded(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers with a first chunk, or the error it is given, then nothing until the client goes."""

    def __init__(self) -> None:
        self.error: Unavailable | None = None
        self.has_begun = threading.Event()
        self.has_ended = threading.Event()

    def Generate(self, request: api.GenerateRequest, context: grpc.ServicerContext) -> Iterator[api.GenerateResponse]:
        context.add_callback(self.has_ended.set)
        yield api.GenerateResponse(started=api.GenerateStarted(request_id="r", resume_token=b"t"))
        self.has_begun.set()
        if self.error is not None:
            context.abort_with_status(rpc_status.to_status(to_status(self.error)))
        self.has_ended.wait(PATIENCE_S)


class Interrupted(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Gives one token per attempt, then is away; the third attempt ends well."""

    def __init__(self) -> None:
        self.requests: list[api.GenerateRequest] = []

    def Generate(self, request: api.GenerateRequest, context: grpc.ServicerContext) -> Iterator[api.GenerateResponse]:
        self.requests.append(request)
        number = len(self.requests)
        yield api.GenerateResponse(started=api.GenerateStarted(request_id="r", seed=7, resume_token=b"t"))
        delta = api.ChoiceDelta(text=f"{number} ", tokens=[api.OutputToken(id=number)])
        yield api.GenerateResponse(delta=delta)
        if number < 3:
            context.abort_with_status(rpc_status.to_status(to_status(Unavailable("away", retry_after_s=0.0))))
        yield api.GenerateResponse(finished=api.GenerateFinished())


@contextmanager
def serving(servicer: coordinator_pb2_grpc.CoordinatorServiceServicer) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture
def coordinator() -> Iterator[tuple[FakeCoordinator, str]]:
    with running_fake_coordinator() as running:
        yield running


@pytest.fixture
def open_ended() -> Iterator[tuple[OpenEnded, str]]:
    servicer = OpenEnded()
    with serving(servicer) as address:
        yield servicer, address


def public_methods(kind: type) -> dict[str, list[str]]:
    return {
        name: list(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_clients_have_the_same_methods() -> None:
    asked_by_gateways = "is_deaf"
    assert {**public_methods(SyncClient), asked_by_gateways: ["self", "timeout_s"]} == {
        **public_methods(Client),
        "generate_resuming": ["self", "request", "policy"],
    }


async def test_both_clients_give_the_same_answers_beside_each_other_in_one_running_loop(
    coordinator: tuple[FakeCoordinator, str],
) -> None:
    body = api.GenerateRequest(prompt="p")
    body.sampling.prompt_logprobs = 1
    async with Client(coordinator[1]) as theirs:
        with SyncClient(coordinator[1]) as ours:
            answers = [await theirs.complete(body), ours.complete(body)]
            infos = [await theirs.model_info(), ours.model_info()]
            states = [await theirs.status(), ours.status()]
    assert answers[0].identity == answers[1].identity
    assert answers[0].prompt_logprobs == answers[1].prompt_logprobs is not None
    assert infos[0] == infos[1]
    assert states[0] == states[1]
    sent = coordinator[0].requests
    assert sent[0] == sent[1]
    assert sent[0].prompt_logprobs_in_parts


@pytest.mark.parametrize(
    ("prompt", "model", "temperature", "kind"),
    [
        ("p", "", 3.0, InvalidRequest),
        ("p", "missing", 1.0, ModelNotFound),
        ("overload", "", 1.0, Overloaded),
    ],
)
def test_errors_are_typed(
    coordinator: tuple[FakeCoordinator, str], prompt: str, model: str, temperature: float, kind: type[Exception]
) -> None:
    body = api.GenerateRequest(prompt=prompt, model=model, sampling={"temperature": temperature})
    with SyncClient(coordinator[1]) as client, pytest.raises(kind):
        client.complete(body)


def test_errors_of_single_calls_are_typed(coordinator: tuple[FakeCoordinator, str]) -> None:
    with SyncClient(coordinator[1], ClientSettings(max_message_bytes=1000)) as client:
        with pytest.raises(InvalidRequest) as caught:
            client.tokenize("x" * 2000)
        assert caught.value.field == "request"
        with pytest.raises(Exception, match="not implemented") as unimplemented:
            client.abort("r")
    assert type(unimplemented.value).__name__ == "Unimplemented"


@pytest.mark.parametrize("kind", [Client, SyncClient])
@pytest.mark.parametrize("address", ["http://127.0.0.1:50051", "127.0.0.1", "localhost:99999", ""])
async def test_an_address_that_cannot_be_called_is_refused_at_once(kind: type[Any], address: str) -> None:
    with pytest.raises(InvalidRequest, match="is not host:port") as caught:
        kind(address)
    assert caught.value.field == "address"


@pytest.mark.parametrize("kind", [Client, SyncClient])
async def test_an_answer_above_the_clients_own_limit_is_no_overload(
    coordinator: tuple[FakeCoordinator, str], kind: type[Any]
) -> None:
    async def told(answer: Any) -> Any:
        return await answer if inspect.isawaitable(answer) else answer

    client = kind(coordinator[1], ClientSettings(max_message_bytes=10))
    for call in (lambda: client.model_info(), lambda: client.complete(api.GenerateRequest(prompt="p"))):
        with pytest.raises(InvalidRequest, match="exceeds the client's limit of 10") as caught:
            await told(call())
        assert caught.value.field == "max_message_bytes"
    await told(client.close())


def test_a_request_above_the_servers_limit_is_no_overload(coordinator: tuple[FakeCoordinator, str]) -> None:
    client = SyncClient(coordinator[1], ClientSettings(max_message_bytes=2**30))
    with client, pytest.raises(InvalidRequest, match="exceed the server's limit") as caught:
        client.tokenize("x" * 5 * 2**20)
    assert caught.value.field == "request"


@for_each(
    "wrong",
    [
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"keepalive_s": -1.0},
        {"keepalive_timeout_s": float("nan")},
        {"connect_timeout_s": 1e10},
        {"max_message_bytes": 0},
        {"max_message_bytes": 2**31},
        {"metadata": (("X-Team", "a"),)},
        {"metadata": (("x team", "a"),)},
        {"metadata": (("x-team", "a\n"),)},
        {"metadata": (("x-team", "\u00e9"),)},
    ],
)
def test_settings_that_grpc_takes_for_a_failure_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ClientSettings(**wrong)
    assert [caught.value.field] == list(wrong)


def test_a_key_that_no_header_carries_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match="line break") as caught:
        ClientSettings(api_key="key-of-a-file\n")
    assert caught.value.field == "api_key"


def test_a_message_that_is_a_text_is_refused_by_its_place() -> None:
    messages: Any = [{"role": "user", "content": "hi"}, "hello"]
    with pytest.raises(InvalidRequest, match=r"messages\[1\]: is a str, not a message"):
        chat_messages(messages)


def test_a_request_is_sent_when_its_first_chunk_is_asked_for(coordinator: tuple[FakeCoordinator, str]) -> None:
    with SyncClient(coordinator[1]) as client:
        with client.generate(api.GenerateRequest(prompt="never")):
            pass
        assert client.complete(api.GenerateRequest(prompt="asked")).choices[0].text == TEXT
    assert [request.prompt for request in coordinator[0].requests] == ["asked"]


def test_threads_share_a_client(coordinator: tuple[FakeCoordinator, str]) -> None:
    with SyncClient(coordinator[1]) as client, futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(client.complete, [api.GenerateRequest(prompt="p", sampling={"n": 2})] * 24))
    assert {(index, text) for answer in answers for index, _, text in answer.identity} == {(0, TEXT), (1, TEXT)}


def test_leaving_a_loop_cancels_the_request(open_ended: tuple[OpenEnded, str]) -> None:
    servicer, address = open_ended
    with SyncClient(address) as client:
        for _ in client.generate(api.GenerateRequest(prompt="p")):
            break
        assert servicer.has_ended.wait(PATIENCE_S)


def test_a_closed_stream_has_no_more_chunks(open_ended: tuple[OpenEnded, str]) -> None:
    servicer, address = open_ended
    with SyncClient(address) as client:
        stream = client.generate(api.GenerateRequest(prompt="p"))
        next(stream)
        stream.close()
        with pytest.raises(Cancelled):
            next(stream)
        assert servicer.has_ended.wait(PATIENCE_S)


@pytest.mark.parametrize("closes_client", [False, True], ids=["stream", "client"])
def test_another_thread_ends_an_iteration_that_waits(open_ended: tuple[OpenEnded, str], closes_client: bool) -> None:
    servicer, address = open_ended
    with SyncClient(address) as client, futures.ThreadPoolExecutor(1) as pool:
        stream = client.generate(api.GenerateRequest(prompt="p"))
        reading = pool.submit(list, stream)
        assert servicer.has_begun.wait(PATIENCE_S)
        (client if closes_client else stream).close()
        with pytest.raises(Cancelled):
            reading.result(PATIENCE_S)
        assert servicer.has_ended.wait(PATIENCE_S)


def test_an_interrupted_stream_goes_on_behind_what_is_held() -> None:
    servicer = Interrupted()
    completion = Completion()
    with serving(servicer) as address, SyncClient(address) as client:
        for chunk in client.generate_resuming(api.GenerateRequest(prompt="p"), ResumePolicy(max_wait_s=0.0)):
            completion.add(chunk)
    assert completion.identity == [(0, [1, 2, 3], "1 2 3 ")]
    held = [[list(choice.token_ids) for choice in request.resume.choices] for request in servicer.requests]
    assert held == [[], [[1]], [[1, 2]]]


def test_attempts_that_bring_nothing_end_with_the_error() -> None:
    servicer = OpenEnded()
    servicer.error = Unavailable("away", retry_after_s=0.0)
    with serving(servicer) as address, SyncClient(address) as client:
        stream = client.generate_resuming(api.GenerateRequest(prompt="p"), ResumePolicy(max_attempts=2, max_wait_s=0))
        with pytest.raises(Unavailable):
            list(stream)


def test_a_stream_that_waits_for_its_next_attempt_can_be_closed(open_ended: tuple[OpenEnded, str]) -> None:
    servicer, address = open_ended
    servicer.error = Unavailable("away", retry_after_s=3600.0)
    with SyncClient(address) as client, futures.ThreadPoolExecutor(1) as pool:
        stream = client.generate_resuming(api.GenerateRequest(prompt="p"), ResumePolicy(max_wait_s=3600.0))
        reading = pool.submit(list, stream)
        assert servicer.has_ended.wait(PATIENCE_S)
        stream.close()
        with pytest.raises(Cancelled):
            reading.result(PATIENCE_S)


def test_a_program_may_end_with_a_stream_open(open_ended: tuple[OpenEnded, str]) -> None:
    servicer, address = open_ended
    command = [sys.executable, "-c", LEAVES_A_STREAM_OPEN, address]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "r\n", "")
    assert servicer.has_ended.wait(PATIENCE_S)


def test_a_client_that_closes_with_grace_lets_a_running_stream_end_and_takes_no_other(
    coordinator: tuple[FakeCoordinator, str],
) -> None:
    client = SyncClient(coordinator[1])
    stream = client.generate(api.GenerateRequest(prompt="p"))
    first = next(stream)
    with futures.ThreadPoolExecutor(1) as pool:
        closing = pool.submit(client.close, 60.0)
        rest = list(stream)
        closing.result(60)
    completion = Completion()
    for chunk in (first, *rest):
        completion.add(chunk)
    assert completion.choices[0].text == TEXT
    with pytest.raises(Cancelled):
        client.generate(api.GenerateRequest(prompt="p"))
