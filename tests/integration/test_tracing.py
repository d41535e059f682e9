"""One trace per request, as a collector gets it from three real processes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from specdec.client import Client, ClientSettings, Completion
from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api
from tests.support.servers.collector import Collector, ReceivedSpan, collecting, only
from tests.support.services.clusters import MakeCluster, start_cluster
from tests.support.services.faults import eventually
from tests.support.services.model_pair import ModelPair

PROMPT = "Zanzibar dreams of parallelogram lighthouses"
STOP = "quicksilver marmalade"
NUM_SPANS_PER_REQUEST = 3
"""The request, tokenize, admission."""
NUM_SPANS_PER_CHOICE = 10
"""Two openings, and at each replica its session with three phases."""
NUM_SPANS = NUM_SPANS_PER_REQUEST + NUM_SPANS_PER_CHOICE
CLOCK_SLACK_NS = 50_000_000
"""Spans of three processes are laid over each other by the wall clock."""

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced_cluster(
    collector: Collector, tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    settings = {"otlp_endpoint": collector.endpoint, "log_format": "json"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        cluster = start_cluster(
            tiny_pair,
            tmp_path_factory.mktemp("traced_cluster"),
            target_settings=settings,
            draft_settings=settings,
            coordinator_settings={**settings, "log_level": "debug"},
        )
    with cluster:
        yield cluster


def new_trace(*, sampled: bool = True) -> tuple[str, str, str]:
    """A traceparent as a client sends it, its trace id and its span id."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}", trace_id, span_id


def request(**sampling: Any) -> api.GenerateRequest:
    sampling = {"seed": 5, "max_tokens": 40, "temperature": 0.7, "top_p": 0.9, "ignore_eos": True, **sampling}
    return api.GenerateRequest(prompt=PROMPT, sampling=api.SamplingParams(stop=[STOP], **sampling))


async def complete(address: str, traceparent: str | None = None) -> Completion:
    metadata = () if traceparent is None else (("traceparent", traceparent),)
    async with Client(address, ClientSettings(metadata=metadata)) as client:
        return await client.complete(request())


async def traced(address: str, **sampling: Any) -> tuple[Completion, str, str]:
    """A request in each of whose choices the draft had a part, as it has on all but a very busy machine.

    Returns what came of it, the trace id that the client sent, and its span id.
    """
    told: list[tuple[Completion, str, str]] = []

    async def has_part() -> bool:
        traceparent, trace_id, span_id = new_trace()
        async with Client(address, ClientSettings(metadata=(("traceparent", traceparent),))) as client:
            completion = await client.complete(request(**sampling))
        told[:] = [(completion, trace_id, span_id)]
        ends = [choice.finished for choice in completion.choices.values()]
        return all(end is not None and end.stats.num_accepted > 0 for end in ends)

    await eventually(has_part, "the draft has a part in the answer")
    return told[0]


def parents(spans: list[ReceivedSpan]) -> dict[tuple[str, str], str]:
    """Of each span its service and name, and the name of the span above it."""
    names = {span.span.span_id: span.name for span in spans}
    return {
        (span.service.removeprefix("specdec-"), span.name): names.get(span.span.parent_span_id, "") for span in spans
    }


async def test_a_request_is_one_trace_through_the_three_services(traced_cluster: Cluster, collector: Collector) -> None:
    completion, trace_id, span_id = await traced(traced_cluster.address)
    spans = collector.whole_trace(trace_id, NUM_SPANS)
    request_name = "text_completion target"
    assert parents(spans) == {
        ("coordinator", request_name): "",
        ("coordinator", "tokenize"): request_name,
        ("coordinator", "admission"): request_name,
        ("coordinator", "verify session"): request_name,
        ("coordinator", "draft session"): request_name,
        ("target", "verify session"): "verify session",
        ("target", "queue"): "verify session",
        ("target", "prefill"): "verify session",
        ("target", "decode"): "verify session",
        ("draft", "draft session"): "draft session",
        ("draft", "queue"): "draft session",
        ("draft", "prefill"): "draft session",
        ("draft", "draft"): "draft session",
    }
    root = only(spans, "coordinator", request_name)
    assert root.span.parent_span_id.hex() == span_id
    assert all(span.is_within(root, CLOCK_SLACK_NS) for span in spans if span.service != "specdec-draft")
    for role, name in (("target", "verify session"), ("draft", "draft session")):
        mine, above = only(spans, role, name), only(spans, "coordinator", name)
        assert mine.span.parent_span_id == above.span.span_id
        assert above.attributes["server.port"] == int(traced_cluster.services[role].spec.address.rpartition(":")[2])
    assert {span.resource["deployment.environment.name"] for span in spans} == {"test"}
    assert completion.num_tokens == 40


async def test_the_requests_span_says_what_was_asked_for_and_what_came_of_it(
    traced_cluster: Cluster, collector: Collector
) -> None:
    completion, trace_id, _ = await traced(traced_cluster.address)
    spans = collector.whole_trace(trace_id, NUM_SPANS)
    attributes = only(spans, "coordinator", "text_completion target").attributes
    finished = completion.require_finished()
    assert completion.started is not None
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "specdec",
        "gen_ai.request.model": "target",
        "gen_ai.response.model": "target",
        "gen_ai.response.id": completion.started.request_id,
        "gen_ai.request.seed": 5,
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": finished.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": finished.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": finished.usage.cached_tokens,
        "rpc.system": "grpc",
        "rpc.grpc.status_code": 0,
        "specdec.verify_mode": "coupled",
        "specdec.num_steps": finished.stats.num_steps,
        "specdec.num_accepted": finished.stats.num_accepted,
        "specdec.num_draft_fallbacks": 0,
        "specdec.num_target_reopens": 0,
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert attributes["gen_ai.request.temperature"] == pytest.approx(0.7)
    assert attributes["gen_ai.request.top_p"] == pytest.approx(0.9)
    assert attributes["specdec.mean_acceptance_length"] == pytest.approx(finished.stats.mean_acceptance_length)
    assert attributes["specdec.hit_rate"] == pytest.approx(finished.stats.hit_rate)
    assert 0 < attributes["specdec.acceptance_rate"] <= 1
    assert "error.type" not in attributes

    target = only(spans, "target", "verify session").attributes
    assert target["specdec.num_tokens"] == finished.usage.completion_tokens
    assert target["specdec.num_accepted"] == finished.stats.num_accepted
    assert target["specdec.num_verified"] == finished.stats.num_proposed
    assert target["specdec.num_kv_blocks"] > 0
    assert target["specdec.num_preemptions"] == 0
    assert target["specdec.device"] == "cpu"
    assert target["specdec.end_reason"] == "length"
    draft = only(spans, "draft", "draft session").attributes
    assert draft["specdec.num_proposals"] > 0
    assert 0 < draft["specdec.num_accepted"] <= draft["specdec.num_tokens"]


async def test_each_choice_has_its_spans_at_both_replicas(traced_cluster: Cluster, collector: Collector) -> None:
    completion, trace_id, _ = await traced(traced_cluster.address, n=3)
    spans = collector.whole_trace(trace_id, 3 * NUM_SPANS_PER_CHOICE + NUM_SPANS_PER_REQUEST)
    told = [span.attributes for span in spans if (span.service, span.name) == ("specdec-target", "verify session")]
    assert len({attributes["specdec.session_id"] for attributes in told}) == 3
    assert sum(attributes["specdec.num_tokens"] for attributes in told) == completion.num_tokens == 120


async def test_no_word_of_prompt_stop_string_or_output_is_exported(
    traced_cluster: Cluster, collector: Collector
) -> None:
    completion, trace_id, _ = await traced(traced_cluster.address)
    collector.whole_trace(trace_id, NUM_SPANS)
    exported = b"".join(collector.exports)
    output = completion.choices[0].text
    words = [*PROMPT.split(), *STOP.split(), output, *(output[at : at + 6] for at in range(len(output) - 5))]
    words = [word for word in words if len(word) > 4]
    assert len(words) > 10
    assert [word for word in words if word.encode() in exported] == []


async def test_log_lines_of_a_request_carry_its_trace(traced_cluster: Cluster, collector: Collector) -> None:
    _, trace_id, _ = await traced(traced_cluster.address)
    root = only(collector.whole_trace(trace_id, NUM_SPANS), "coordinator", "text_completion target")
    lines = traced_cluster.services["coordinator"].log_path.read_text(encoding="utf-8").splitlines()
    ends = [json.loads(line) for line in lines if '"request_ended"' in line and trace_id in line]
    assert [line["span_id"] for line in ends] == [root.span.span_id.hex()]


async def test_a_callers_span_is_continued_by_our_client(traced_cluster: Cluster, collector: Collector) -> None:
    with TracerProvider(shutdown_on_exit=False).get_tracer("test").start_as_current_span("caller") as span:
        await complete(traced_cluster.address)
    context = span.get_span_context()
    trace_id, name = f"{context.trace_id:032x}", "text_completion target"
    collector.until(lambda: any(span.name == name for span in collector.trace(trace_id)))
    root = only(collector.trace(trace_id), "coordinator", name)
    assert root.span.parent_span_id == context.span_id.to_bytes(8, "big")


async def test_a_request_that_its_caller_does_not_trace_leaves_no_span(
    traced_cluster: Cluster, collector: Collector
) -> None:
    untraced, untraced_id, _ = new_trace(sampled=False)
    await complete(traced_cluster.address, untraced)
    _, traced_id, _ = await traced(traced_cluster.address)
    collector.whole_trace(traced_id, NUM_SPANS)  # queues keep the order, so the other's would be there by now
    assert collector.trace(untraced_id) == []
    assert untraced_id in traced_cluster.services["coordinator"].log_path.read_text(encoding="utf-8")


async def test_spans_of_the_last_request_arrive_although_the_services_stop_at_once(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with collecting() as collector:
        settings = {"otlp_endpoint": collector.endpoint}
        cluster = make_cluster(target_settings=settings, draft_settings=settings, coordinator_settings=settings)
        _, trace_id, _ = await traced(cluster.address)
        assert collector.num_calls == 0
        cluster.stop()
        assert len(collector.trace(trace_id)) == NUM_SPANS
