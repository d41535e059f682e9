"""What comes of an endpoint's answers: text, or a fault of a known kind; and what it may still be asked."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from specdec.config.drafter_options import OpenAiApiOptions
from specdec.drafting.endpoints.calls import ApiRefused, read_endpoint
from specdec.drafting.endpoints.ledger import Ledger
from specdec.drafting.endpoints.stream import CompletionStream
from tests.support.for_each import for_each
from tests.support.servers.hostile_api import HEAD, event, fixed_api, said

PATIENCE_S = 30.0
END = event(b"[DONE]")


class Asked:
    """One call of an endpoint."""

    def __init__(self, **options: object) -> None:
        self.options = OpenAiApiOptions.model_validate({"model": "m", "max_tokens": 8, "timeout_s": 0.5, **options})
        self.ledger = Ledger(self.options, lambda: 0.0)
        self.faults: queue.SimpleQueue[str] = queue.SimpleQueue()
        reservation = self.ledger.reserve(3, self.options.max_tokens)
        assert reservation is not None
        self.stream = CompletionStream(read_endpoint(self.options), self.ledger, reservation, "abc", self.faults.put)

    def ended(self) -> str | None:
        """The kind of its fault, once it is over."""
        assert self.stream.join(PATIENCE_S)
        return None if self.faults.empty() else self.faults.get()


def test_text_arrives_and_what_was_used_is_counted() -> None:
    usage = event(b'{"choices":[],"usage":{"completion_tokens":2}}')
    stop = event(b'{"choices":[{"text":"!","finish_reason":"stop"}]}')
    with fixed_api(HEAD + said("Hello") + b": a comment\n\n" + said(" world") + stop + usage + END) as api:
        asked = Asked(base_url=api.url, price_per_million_completion_tokens=1.0)
        assert asked.ended() is None
    assert asked.stream.text == "Hello world!"
    assert asked.stream.is_complete
    spent = asked.ledger.spent
    assert (spent.num_prompt_tokens, spent.num_completion_tokens) == (3, 3)
    assert spent.cost == pytest.approx(3e-6)
    assert b'"prompt": "abc"' in api.requests[0]


@for_each(
    "answer, kind",
    [
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", "redirect"),
        (b"HTTP/1.1 500 no\r\ncontent-length: 0\r\n\r\n", "status_5xx"),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 0\r\n\r\n", "content_type"),
        (HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n"), "encoding"),
        (b"garbage\r\n\r\n", "BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n", "HTTPException"),
        (HEAD + event(b"{"), "no_json"),
        (HEAD + event(b"[" * 60_000), "no_json"),
        (HEAD + event(b"[]"), "wrong_json"),
        (HEAD + event(b'{"choices":[{"text":7}]}'), "wrong_json"),
        (HEAD + event(b'{"choices":[{"text":"a"},{"text":"b"}]}'), "wrong_json"),
        (HEAD + event(b'{"choices":[{"text":"\\ud800"}]}'), "no_unicode"),
        (HEAD + event(b'{"error":{"message":"secret"}}'), "error_event"),
        (HEAD + event(b'"' + b"x" * 2**20 + b'"'), "long_line"),
        (HEAD + said("x" * 1000) * 2, "too_much"),
        (HEAD + said("x"), "cut_off"),
    ],
)
def test_an_answer_that_is_none_is_a_fault_of_its_kind(answer: bytes, kind: str) -> None:
    with fixed_api(answer) as api:
        asked = Asked(base_url=api.url)
        assert asked.ended() == kind
        assert len(api.requests) == 1


def test_a_silent_endpoint_is_left_after_its_time() -> None:
    with fixed_api(HEAD + said("a"), stays=True) as api:
        asked = Asked(base_url=api.url)
        assert asked.ended() == "timeout"
        assert api.hung_up.wait(PATIENCE_S)


def test_an_endless_answer_is_left_at_its_bound() -> None:
    with fixed_api(HEAD, repeats=b": for ever\n\n" * 1000) as api:
        assert Asked(base_url=api.url).ended() == "too_much"
        assert api.hung_up.wait(PATIENCE_S)


def test_closing_a_stream_hangs_up_and_is_no_fault() -> None:
    with fixed_api(HEAD + said("a"), stays=True) as api:
        asked = Asked(base_url=api.url, timeout_s=600)
        asked.stream.close()
        assert asked.ended() is None
    assert asked.stream.is_over


def test_an_endpoints_own_count_is_believed_within_what_was_asked_for() -> None:
    for counted, believed in ((b"-5", 1), (b"4", 4), (b"1000000", 8), (b'"x"', 1), (b"true", 1)):
        usage = event(b'{"choices":[],"usage":{"completion_tokens":' + counted + b"}}")
        with fixed_api(HEAD + said("a") + usage + END) as api:
            asked = Asked(base_url=api.url)
            assert asked.ended() is None
        assert asked.ledger.spent.num_completion_tokens == believed


def test_limits_in_tokens_and_in_money_are_never_exceeded() -> None:
    by_tokens = Ledger(OpenAiApiOptions(base_url="http://x/v1", model="m", max_total_tokens=30), lambda: 0.0)
    first = by_tokens.reserve(10, 10)
    assert first is not None
    assert by_tokens.reserve(10, 10) is None
    by_tokens.settle(first, 2, None)
    assert by_tokens.reserve(10, 8) is not None
    assert by_tokens.reserve(1, 1) is None
    priced = {"price_per_million_prompt_tokens": 2.0, "price_per_million_completion_tokens": 10.0, "max_cost": 0.00015}
    by_cost = Ledger(OpenAiApiOptions.model_validate({"base_url": "http://x/v1", "model": "m", **priced}), lambda: 0.0)
    assert by_cost.reserve(10, 10) is not None
    assert by_cost.reserve(10, 10) is None


def test_after_failures_nothing_is_asked_for_longer_and_longer() -> None:
    now_s = 0.0
    ledger = Ledger(OpenAiApiOptions(base_url="http://x/v1", model="m"), lambda: now_s)
    waits = []
    for _ in range(12):
        waits.append(ledger.failed())
        assert not ledger.may_ask
        now_s += waits[-1]
        assert ledger.may_ask
    assert waits == sorted(waits)
    assert (waits[0], waits[1], waits[-1]) == (1.0, 2.0, 300.0)
    ledger.was_useful()
    assert ledger.failed() == 1.0


def test_several_streams_behind_the_target_are_a_failure() -> None:
    ledger = Ledger(OpenAiApiOptions(base_url="http://x/v1", model="m"), lambda: 0.0)
    assert [ledger.was_slow() for _ in range(4)] == [None, None, None, 1.0]


def test_a_key_comes_from_a_file_or_a_variable_and_is_shown_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-0123456789"
    (tmp_path / "key").write_text(f"{key}\n")
    monkeypatch.setenv("THE_KEY", key)
    for source in ({"api_key_file": str(tmp_path / "key")}, {"api_key_env": "THE_KEY"}):
        with fixed_api(HEAD + END) as api:
            asked = Asked(base_url=api.url, **source)
            assert asked.ended() is None
        assert f"Authorization: Bearer {key}".encode() in api.requests[0]
        assert key not in repr(read_endpoint(asked.options)) + repr(asked.options)


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "ftp://host/v1"},
        {"base_url": "http://user:secret@host/v1"},
        {"base_url": "http://host:70000/v1"},
        {"base_url": "http://host/v1", "api_key_env": "NOT_THERE_AT_ALL"},
        {"base_url": "http://host/v1", "api_key_file": "/not/there"},
    ],
)
def test_an_endpoint_that_cannot_be_called_is_refused_without_its_secrets(options: dict[str, str]) -> None:
    with pytest.raises(ApiRefused) as caught:
        read_endpoint(OpenAiApiOptions.model_validate({"model": "m", **options}))
    assert "secret" not in str(caught.value)
