"""Traces of a real coordinator between scripted replicas: what is opted in, what goes wrong, what is not exported."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from specdec.commands.up.cluster import free_port
from specdec.coordinator.intake.callers import TENANT_KEY
from specdec.telemetry.tracing import Tracing
from specdec.telemetry.tracing_settings import TracingSettings
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.tls_files import TlsFilesBroken
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.certificates import Authority, Certificate, SecretVolume
from tests.support.servers.collector import Collector, ReceivedSpan, collecting, only
from tests.support.services.coordinator_harness import Result, collect, expected_ids, request, running

pytestmark = pytest.mark.integration
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
SAMPLED = ("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01")
UNSAMPLED = ("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-00")
NAME = "text_completion scripted"
STOPPED_WITHIN_S = 10.0
"""Far above the two seconds that a flush may take, far below the ten that an export may."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # nothing leaves before the coordinator stops
    with collecting() as collector:
        yield collector


async def traced(collector: Collector, *metadata: tuple[str, str], **settings: Any) -> ScriptedTarget:
    """One request, and the end of its coordinator."""
    target = ScriptedTarget()
    settings = {"otlp_endpoint": collector.endpoint, **settings}
    async with running([target], **settings) as harness:
        result = await collect(harness.stub.Generate(request(), metadata=metadata))
        assert result.ids() == expected_ids(target, 20)
    return target


def root_of(collector: Collector, name: str = NAME) -> ReceivedSpan:
    return only(collector.spans, "coordinator", name)


def traceparents(target: ScriptedTarget) -> set[str]:
    return {
        entry.open.traceparent
        for frame in target.frames
        for entry in frame.entries
        if entry.WhichOneof("entry") == "open"
    }


async def read_tokens(call: Any, num_tokens: int) -> None:
    """Read a stream until it has brought this many tokens: then the coordinator has them, too."""
    result = Result()
    while len(result.ids()) < num_tokens:
        result.add(await call.read())


async def test_a_request_begins_a_trace_of_its_own_when_its_caller_has_none(collector: Collector) -> None:
    target = await traced(collector)
    root, session = root_of(collector), only(collector.spans, "coordinator", "verify session")
    assert root.span.parent_span_id == b""
    (traceparent,) = traceparents(target)
    assert traceparent.startswith(f"00-{root.trace_id}-{session.span.span_id.hex()}-")


async def test_nothing_is_exported_and_no_replica_is_told_of_a_request_that_is_not_sampled(
    collector: Collector,
) -> None:
    assert traceparents(await traced(collector, trace_sample_ratio=0.0)) == {""}
    assert traceparents(await traced(collector, UNSAMPLED)) == {""}
    assert collector.num_calls == 0


async def test_a_callers_decision_wins_over_the_ratio(collector: Collector) -> None:
    await traced(collector, SAMPLED, ("tracestate", "vendor=7"), trace_sample_ratio=0.0)
    root = root_of(collector)
    assert root.span.trace_state == "vendor=7"
    assert (root.trace_id, root.span.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)


async def test_the_ratio_decides_over_requests_of_callers_without_a_trace(collector: Collector) -> None:
    target = ScriptedTarget()
    async with running([target], otlp_endpoint=collector.endpoint, trace_sample_ratio=0.5) as harness:
        await asyncio.gather(*(collect(harness.stub.Generate(request(max_tokens=1))) for _ in range(100)))
    assert 20 < sum(span.name == NAME for span in collector.spans) < 80  # 6 standard deviations


@pytest.mark.parametrize(
    "header", ["", "00-zz-b7ad6b7169203331-01", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "x" * 4000]
)
async def test_a_traceparent_that_does_not_parse_is_ignored(collector: Collector, header: str) -> None:
    await traced(collector, ("traceparent", header))
    assert root_of(collector).span.parent_span_id == b""


async def test_without_an_endpoint_a_callers_trace_goes_nowhere() -> None:
    before = threading.active_count()
    target = ScriptedTarget()
    async with running([target]) as harness:
        await collect(harness.stub.Generate(request(), metadata=[SAMPLED]))
        assert traceparents(target) == {""}
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("Otel", "otlp"))]
    assert threading.active_count() <= before + 4  # of asyncio's pool


async def test_text_is_exported_only_when_that_is_opted_in(collector: Collector) -> None:
    messages = api.ChatMessages(messages=[api.ChatMessage(role="user", content="a secret question")])
    body = request(messages=messages, stop=["a secret stop"], n=2)
    for with_content in (False, True):
        target = ScriptedTarget()
        target.tokenizer_config = json.dumps({"chat_template": "{{ messages[0].content }}"})
        async with running([target], otlp_endpoint=collector.endpoint, trace_content=with_content) as harness:
            result = await collect(harness.stub.Generate(body))
            assert result.texts[0]
        exported = b"".join(collector.exports)
        assert (b"secret" in exported) is with_content
    root = next(span for span in collector.spans if "gen_ai.input.messages" in span.attributes)
    attributes = root.attributes
    assert json.loads(attributes["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "a secret question"}]}
    ]
    assert json.loads(attributes["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": result.texts[index]}], "finish_reason": "length"}
        for index in range(2)
    ]
    assert attributes["gen_ai.request.stop_sequences"] == ["a secret stop"]
    assert attributes["gen_ai.operation.name"] == "chat"


async def test_long_texts_are_cut_where_opentelemetrys_variable_says(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "50")
    async with running([ScriptedTarget()], otlp_endpoint=collector.endpoint, trace_content=True) as harness:
        await collect(harness.stub.Generate(request(prompt="fox " * 1000)))
    assert len(root_of(collector).attributes["gen_ai.input.messages"]) == 50


async def test_each_choice_has_a_session_span(collector: Collector) -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    async with running([target], [draft], otlp_endpoint=collector.endpoint) as harness:
        await collect(harness.stub.Generate(request(n=3)))
    for name in ("verify session", "draft session"):
        spans = [span for span in collector.spans if span.name == name]
        assert sorted(span.attributes["specdec.choice"] for span in spans) == [0, 1, 2]
        assert {span.attributes["specdec.end_reason"] for span in spans} == {"finished"}
    assert root_of(collector).attributes["gen_ai.request.choice.count"] == 3


async def moved(targets: list[ScriptedTarget], endpoint: str) -> tuple[str, str]:
    """One request that goes on at another target after five tokens; returns the addresses of both."""
    async with running(targets, otlp_endpoint=endpoint) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(request())
        await read_tokens(call, 5)
        first, second = sorted(targets, key=lambda target: not target.opened)
        second.set_limit(None)
        addresses = first.address, second.address
        await first.stop()
        await collect(call)
    return addresses


async def test_a_fail_over_is_an_event_and_a_second_session_span(collector: Collector) -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.set_limit(5)
    structlog.reset_defaults()  # other tests may have silenced it
    with structlog.testing.capture_logs() as lines:
        addresses = await moved(targets, collector.endpoint)
    spans = [span.attributes for span in collector.spans if span.name == "verify session"]
    spans.sort(key=lambda attributes: attributes["specdec.epoch"])
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    assert [span["server.port"] for span in spans] == ports
    assert [span["specdec.position"] for span in spans] == [3, 8]
    assert [span["specdec.end_reason"] for span in spans] == ["replaced", "finished"]
    root = root_of(collector)
    assert root.attributes["specdec.num_target_reopens"] == 1
    assert root.events["specdec.session_moved"] == {
        "specdec.choice": 0,
        "specdec.source": addresses[0],
        "specdec.target": addresses[1],
        "specdec.position": 8,
    }
    ids = [(line["trace_id"], line["span_id"]) for line in lines if line["event"] == "session_moved"]
    assert ids == [(root.trace_id, root.span.span_id.hex())]


async def test_a_lost_draft_is_an_event_with_its_cause(collector: Collector) -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.set_limit(5)
    async with running([target], [draft], otlp_endpoint=collector.endpoint) as harness:
        call = harness.stub.Generate(request())
        await target.until(lambda: target.num_output() == 5)
        await draft.stop()
        await harness.replica_until("draft", "down")
        target.set_limit(None)
        await collect(call)
    root = root_of(collector)
    assert root.events["specdec.draft_fallback"] == {"specdec.choice": 0, "specdec.cause": "stream_broken"}
    assert root.attributes["specdec.num_draft_fallbacks"] == 1


async def test_a_refused_request_has_its_error_but_is_no_fault_of_the_server(collector: Collector) -> None:
    async with running([ScriptedTarget()], otlp_endpoint=collector.endpoint) as harness:
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(harness.stub.Generate(request(top_p=2.0)))
    root = root_of(collector, "text_completion")
    assert root.attributes["error.type"] == "INVALID_REQUEST"
    assert root.attributes["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert root.span.status.code == Status.STATUS_CODE_UNSET


async def test_a_request_whose_target_is_lost_is_an_error(collector: Collector) -> None:
    target = ScriptedTarget()
    target.set_limit(5)
    async with running([target], otlp_endpoint=collector.endpoint, target_timeout_s=0.1) as harness:
        call = harness.stub.Generate(request())
        await read_tokens(call, 5)
        await target.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(call)
    root = root_of(collector)
    assert root.attributes["error.type"] == "TARGET_LOST"
    assert root.span.status.code == Status.STATUS_CODE_ERROR
    assert root.attributes["gen_ai.usage.output_tokens"] == 5


async def test_a_cancelled_request_ends_its_spans(collector: Collector) -> None:
    target = ScriptedTarget()
    target.set_limit(5)
    async with running([target], otlp_endpoint=collector.endpoint) as harness:
        call = harness.stub.Generate(request())
        await target.until(lambda: target.num_output() == 5)
        call.cancel()
        await target.until(lambda: bool(target.closed))
    root = root_of(collector)
    assert root.attributes["error.type"] == "CANCELLED"
    assert root.span.status.code == Status.STATUS_CODE_UNSET
    assert only(collector.spans, "coordinator", "verify session").attributes["specdec.end_reason"] == "cancelled"


async def test_a_tenant_is_exported_as_a_digest(collector: Collector) -> None:
    await traced(collector, (TENANT_KEY, "somebody@example.org"))
    assert (
        root_of(collector).attributes["specdec.tenant_hash"] == hashlib.sha256(b"somebody@example.org").hexdigest()[:16]
    )
    assert b"somebody" not in b"".join(collector.exports)


async def test_headers_go_with_every_export(collector: Collector) -> None:
    await traced(collector, otlp_headers="X-Key=a%20secret,x-org=7")
    assert collector.metadata[0]["x-key"] == "a secret"
    assert collector.metadata[0]["x-org"] == "7"


async def test_a_collector_behind_tls_is_checked_against_its_authority(tmp_path: Path) -> None:
    authority, stranger = Authority("authority"), Authority("stranger")
    own = authority.issue("collector")
    with collecting(grpc.ssl_server_credentials([(own.key, own.chain)])) as collector:
        for trusted in (stranger, authority):
            ca_file = tmp_path / "ca.crt"
            ca_file.write_bytes(trusted.certificate)
            await traced(collector, otlp_ca_file=ca_file)
            assert bool(collector.num_calls) is (trusted is authority)
    root_of(collector)


async def test_what_settings_leave_open_is_read_from_opentelemetrys_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = Authority("authority")
    own, client = authority.issue("collector"), authority.issue("coordinator")
    variables = {"CERTIFICATE": authority.certificate, "CLIENT_KEY": client.key, "CLIENT_CERTIFICATE": client.chain}
    for name, content in variables.items():
        (tmp_path / name).write_bytes(content)
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", str(tmp_path / name))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=7")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "our-own-name")
    credentials = grpc.ssl_server_credentials([(own.key, own.chain)], authority.certificate, True)
    with collecting(credentials) as collector:
        await traced(collector)
    assert {span.service for span in collector.spans} == {"our-own-name"}
    assert collector.metadata[0]["x-key"] == "7"


async def test_a_renewed_client_certificate_is_shown_to_the_collector_and_a_broken_one_never(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = Authority("authority")
    own, first, second = (authority.issue(name) for name in ("collector", "first", "second"))
    volume = SecretVolume(tmp_path / "client", first, authority.certificate)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(volume.key))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", str(volume.certificate))
    target = ScriptedTarget()
    credentials = grpc.ssl_server_credentials([(own.key, own.chain)], authority.certificate, True)
    with collecting(credentials) as collector:
        changes = {"otlp_endpoint": collector.endpoint, "otlp_ca_file": volume.authority}
        async with running([target], **changes) as harness:
            for shown in (first, Certificate(first.key, second.chain)):
                volume.write(shown, authority.certificate)
                num_before = len(collector.clients)
                await collect(harness.stub.Generate(request()))
                await asyncio.to_thread(collector.until, lambda num=num_before: len(collector.clients) > num)
            assert set(collector.clients) == {"first"}
            volume.write(second, authority.certificate)
            await collect(harness.stub.Generate(request()))
            await asyncio.to_thread(collector.until, lambda: "second" in collector.clients)


@pytest.mark.parametrize("missing", ["CLIENT_KEY", "CLIENT_CERTIFICATE"])
async def test_half_a_client_certificate_for_the_collector_is_refused_with_the_variable_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    pair = Authority("authority").issue("coordinator")
    present = {"CLIENT_KEY": pair.key, "CLIENT_CERTIFICATE": pair.chain}
    del present[missing]
    for name, content in present.items():
        (tmp_path / name).write_bytes(content)
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", str(tmp_path / name))
    with pytest.raises(TlsFilesBroken, match=f"OTEL_EXPORTER_OTLP_{next(iter(present))}: "):
        Tracing(TracingSettings(otlp_endpoint="https://127.0.0.1:1"), "target")


async def test_a_collector_that_is_gone_changes_nothing_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    target = ScriptedTarget()
    async with running([target], otlp_endpoint=f"http://127.0.0.1:{free_port()}") as harness:
        for _ in range(3):
            assert (await collect(harness.stub.Generate(request()))).ids() == expected_ids(target, 20)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < STOPPED_WITHIN_S
    exporter = [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry.exporter")]
    assert any("UNAVAILABLE" in message for message in exporter)


async def test_a_collector_that_hangs_changes_nothing_and_does_not_hold_up_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    target = ScriptedTarget()
    with collecting() as collector:
        collector.gate.clear()
        async with running([target], otlp_endpoint=collector.endpoint) as harness:
            await collect(harness.stub.Generate(request()))
            await asyncio.to_thread(collector.until, lambda: collector.num_calls == 1)
            assert (await collect(harness.stub.Generate(request()))).ids() == expected_ids(target, 20)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < STOPPED_WITHIN_S
        assert collector.spans == []
