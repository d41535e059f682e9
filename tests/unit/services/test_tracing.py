"""The parts of tracing: settings, what an engine notes of a session, and what becomes of it in the servicer."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.rpc import code_pb2
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes
from opentelemetry.semconv.attributes import error_attributes, server_attributes

from specdec.config import CoordinatorSettings, TargetSettings, load_settings
from specdec.config.sources import SettingsInvalid
from specdec.replica.bridge.frames import FrameKind
from specdec.replica.worker.errors import SessionFailure
from specdec.replica.worker.trace import SessionTrace
from specdec.telemetry.tracing import Tracing
from specdec.telemetry.tracing_settings import TracingSettings
from specdec.v1 import common_pb2 as pb
from specdec.v1 import trace_pb2
from tests.support.engine.local_pair import LocalPair, open_session, prompts
from tests.support.engine.worker_client import WorkerClient

ROOT = Path(__file__).resolve().parents[3]
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
ENDPOINT = "http://collector:4317"
PROMPT_LEN = 20


def problem_of(*argv: str) -> str:
    with pytest.raises(SettingsInvalid) as caught:
        load_settings(TargetSettings, ["--model", "m", *argv], env_prefix="SPECDEC_TARGET_", prog="t")
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4317",
        "http://collector",
        "http://collector:port",
        "grpc://collector:4317",
        "http://:4317",
        "http://collector:4318/v1/traces",
        "http://collector:99999",
        "http://user:password@collector:4317",
    ],
)
def test_an_endpoint_that_is_none_is_refused_with_the_form_that_is_wanted(endpoint: str) -> None:
    problem = problem_of("--otlp-endpoint", endpoint)
    assert problem.startswith("otlp_endpoint: must be http://HOST:PORT or https://HOST:PORT")
    assert "password" not in problem


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--otlp-headers", "a=b"], "otlp_headers needs otlp_endpoint"),
        (["--otlp-ca-file", "/none"], "otlp_ca_file needs otlp_endpoint"),
        (["--otlp-ca-file", "/none", "--otlp-endpoint", ENDPOINT], "otlp_ca_file needs an otlp_endpoint that begins"),
        (["--otlp-ca-file", "/none", "--otlp-endpoint", "https://c:4317"], "otlp_ca_file: no such file: /none"),
    ],
)
def test_settings_that_do_not_fit_together_are_explained(argv: list[str], complaint: str) -> None:
    assert complaint in problem_of(*argv)


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"])
def test_another_protocol_than_grpc_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "http/protobuf")
    problem = problem_of("--otlp-endpoint", ENDPOINT)
    assert problem.startswith("otlp_endpoint: ") and "gRPC only" in problem
    assert f"{variable} is 'http/protobuf'" in problem


def test_the_protocol_of_traces_goes_before_that_of_all_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    TracingSettings()  # tracing is off: what others in the environment use is none of its business
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    assert TracingSettings(otlp_endpoint=ENDPOINT).otlp_endpoint == ENDPOINT


@pytest.mark.parametrize("headers", ["hunter2", "x-key=1,hunter2", "=hunter2", "x key=hunter2", "x=hunter2%0ab"])
def test_headers_that_do_not_parse_are_refused_without_being_shown(headers: str) -> None:
    problem = problem_of("--otlp-endpoint", ENDPOINT, "--otlp-headers", headers)
    assert problem.startswith("otlp_headers: item ")
    assert "hunter2" not in problem


def test_headers_are_read_as_the_otel_variable_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_COORDINATOR_OTLP_ENDPOINT", "https://collector:4317")
    monkeypatch.setenv("SPECDEC_COORDINATOR_OTLP_HEADERS", "Authorization=Basic%20YTpi==, x-org = 7 ,")
    monkeypatch.setenv("SPECDEC_COORDINATOR_TRACE_SAMPLE_RATIO", "0.25")
    monkeypatch.setenv("SPECDEC_COORDINATOR_TRACE_CONTENT", "true")
    settings = load_settings(
        CoordinatorSettings, ["--targets", "a:1"], env_prefix=CoordinatorSettings.env_prefix, prog="c"
    )
    assert settings.otlp_metadata() == (("authorization", "Basic YTpi=="), ("x-org", "7"))
    assert (settings.trace_sample_ratio, settings.trace_content) == (0.25, True)
    assert "YTpi" not in repr(settings)


def test_tracing_is_off_and_has_no_thread_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", ENDPOINT)
    before = set(threading.enumerate())
    tracing = Tracing(TracingSettings(), "target")
    assert not tracing.is_on
    tracing.record(b"\xff")
    assert set(threading.enumerate()) == before


async def test_tracing_that_was_closed_has_no_thread_left_and_may_be_closed_again() -> None:
    before = {thread.name for thread in threading.enumerate()}
    tracing = Tracing(TracingSettings(otlp_endpoint="http://127.0.0.1:1"), "target")
    assert {thread.name for thread in threading.enumerate()} - before == {"OtelBatchSpanRecordProcessor"}
    tracing.record(b"\xff")  # logged and dropped
    await tracing.close()
    await tracing.close()
    assert not tracing.is_on
    tracing.record(b"")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("Otel", "otlp"))]


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        PARENT.replace("-01", "-00"),
        PARENT.replace("0a", "0A"),
        f"01{PARENT[2:]}",
        f"{PARENT}-more",
        "x" * 100,
    ],
)
def test_a_session_is_traced_only_with_a_valid_and_sampled_parent(traceparent: str) -> None:
    assert SessionTrace.begin(traceparent) is None
    assert SessionTrace.begin(PARENT) is not None


@pytest.mark.parametrize(
    ("first_step_at_s", "prefilled_at_s", "phases"),
    [(None, None, ["queue"]), (2.0, None, ["queue", "prefill"]), (2.0, 3.0, ["queue", "prefill", "decode"])],
)
def test_phases_follow_each_other_without_a_gap_up_to_the_end(
    first_step_at_s: float | None, prefilled_at_s: float | None, phases: list[str]
) -> None:
    trace = SessionTrace(PARENT, 1.0, first_step_at_s, prefilled_at_s, {"a": 1, "b": 0.5, "c": "x", "d": True})
    told = trace_pb2.SessionSpan.FromString(trace.encode("verify session", "decode"))
    span, children = told.span, told.span.children
    assert [child.name for child in children] == phases
    starts = [child.start_unix_ns for child in children]
    ends = [child.end_unix_ns for child in children]
    assert (starts[0], ends[-1]) == (span.start_unix_ns, span.end_unix_ns)
    assert starts[1:] == ends[:-1]
    assert [end - start for start, end in zip(starts, ends, strict=True)][:-1] == [10**9] * (len(phases) - 1)
    assert [fact.WhichOneof("value") for fact in span.attributes] == ["integer", "number", "text", "flag"]


@pytest.fixture(scope="module")
def pair() -> LocalPair:
    return LocalPair(hold_off_ms=0.0)


@pytest.fixture(params=["target", "draft"])
def client(pair: LocalPair, request: pytest.FixtureRequest) -> Iterator[WorkerClient]:
    client = WorkerClient(pair, request.param)
    client.worker.owners.traces = True
    client.attach()
    yield client
    client.end_all()


def opened(client: WorkerClient, traceparent: str = PARENT, **body: Any) -> None:
    session = open_session(
        prompts()[0][:PROMPT_LEN], max_tokens=100, ignore_eos=True, body={"traceparent": traceparent, **body}
    )
    client.entry("s", open=session)
    client.turn(3)


def attributes_of(told: trace_pb2.SessionSpan) -> dict[str, Any]:
    return {fact.key: getattr(fact, str(fact.WhichOneof("value"))) for fact in told.span.attributes}


def test_a_traced_session_is_told_once_when_it_ends(client: WorkerClient) -> None:
    opened(client)
    assert client.spans == []
    client.entry("s", close=pb.CloseSession(reason="finished"))
    client.turn(2)
    (told,) = client.spans
    assert told.traceparent == PARENT
    attributes = attributes_of(told)
    assert attributes["specdec.session_id"] == "s"
    assert attributes["specdec.num_steps"] >= 1
    assert attributes["specdec.num_prompt_tokens"] == PROMPT_LEN
    assert attributes["specdec.num_kv_blocks"] >= 1
    assert attributes["specdec.end_reason"] == "finished"
    assert [child.name for child in told.span.children] == ["queue", "prefill", "decode"]


@pytest.mark.parametrize("traceparent", ["", PARENT[:-1] + "0", "no traceparent"])
def test_a_session_that_is_not_traced_is_not_told(client: WorkerClient, traceparent: str) -> None:
    opened(client, traceparent)
    client.entry("s", close=pb.CloseSession(reason="finished"))
    client.turn()
    assert client.spans == []
    assert client.take("opened")


def test_a_replica_without_a_collector_notes_nothing(client: WorkerClient) -> None:
    client.worker.owners.traces = False
    opened(client)
    assert client.session().trace is None


def test_a_session_that_fails_says_why_and_its_log_line_carries_the_trace(
    client: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(client)
    lines: list[dict[str, Any]] = []

    class Log:
        def warning(self, event: str, **fields: Any) -> None:
            lines.append({"event": event, **fields})

    monkeypatch.setattr(client.host, "_log", Log())
    client.worker.owners.fail(client.session(), SessionFailure(code_pb2.INTERNAL, "BROKEN", "it broke"))
    client.turn()
    attributes = attributes_of(client.spans[0])
    assert (attributes["error.type"], attributes["specdec.end_reason"]) == ("BROKEN", "failed")
    assert [(line["session"], line["trace_id"], line["span_id"]) for line in lines] == [("s", TRACE_ID, PARENT[36:52])]


def test_an_opening_that_replaces_another_ends_its_span(client: WorkerClient) -> None:
    opened(client)
    body = open_session(prompts()[0][:PROMPT_LEN], max_tokens=100, ignore_eos=True, body={"traceparent": PARENT})
    client.entry("s", epoch=2, open=body)
    client.turn()
    assert [attributes_of(told)["specdec.end_reason"] for told in client.spans] == ["reopened"]
    assert client.session().trace is not None


def test_sessions_that_an_engine_leaves_behind_are_told_when_it_stops(client: WorkerClient) -> None:
    opened(client)
    client.frame(FrameKind.SHUTDOWN, 0)
    client.worker.run()
    client.turn(0)
    assert [attributes_of(told)["specdec.end_reason"] for told in client.spans] == ["shutdown"]


def test_names_of_attributes_are_those_of_the_conventions() -> None:
    modules = (gen_ai_attributes, rpc_attributes, error_attributes, server_attributes)
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    sources = [ROOT / "coordinator/sessions/request_trace.py", ROOT / "specdec/replica/worker/host.py"]
    names = re.compile(r'"((?:gen_ai|rpc|error|server)\.[a-z_.]+)"')
    used = {name for path in sources for name in names.findall(path.read_text(encoding="utf-8"))}
    assert len(used) > 20
    assert used - known == set()


def test_an_epoch_of_any_size_is_told(client: WorkerClient) -> None:
    body = open_session(prompts()[0][:PROMPT_LEN], max_tokens=100, body={"traceparent": PARENT})
    client.entry("s", 2**64 - 1, open=body)
    client.turn(2)
    client.entry("s", 2**64 - 1, close=pb.CloseSession(reason="finished"))
    client.turn()
    (told,) = client.spans
    assert attributes_of(told)["specdec.epoch"] == str(2**64 - 1)
