"""A real Prometheus scrapes a real cluster under load: dashboards and rules ask for what the services export."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import promql_parser
import pytest
import yaml

from specdec.client import Client
from specdec.commands.up.cluster import Cluster, free_port
from specdec.v1 import coordinator_pb2
from specdec.wire.errors import SpecdecError
from tests.support.servers.certificates import SecretVolume
from tests.support.servers.prometheus_server import RULES, PrometheusServer, prometheus_server
from tests.support.servers.redis_server import RedisServer, redis_client
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import start_again
from tests.support.services.model_pair import ModelPair
from tests.support.services.secured import secure

DASHBOARDS = Path(__file__).parents[2] / "helm" / "specdec" / "files" / "dashboards"
RENDERS = Path(__file__).parents[1] / "chart" / "golden"
CLUSTER_LABELS = re.compile(r'{namespace="[^"]*",service="[^"]*"}')
JOBS = ("coordinator", "gateway", "target", "draft")
MAX_RUNNING = 4
BURST = 16
LOAD_S = 200.0
VARIABLES = {"$__rate_interval": "2m", "$instance": ".*", "$namespace": ".*"}
Query = tuple[str, str, str]


def dashboard_queries() -> list[Query]:
    """Where, PromQL and legend of every query of every dashboard."""
    found = []
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for query in panel.get("targets", []):
                where = f"{path.stem}: {panel['title']}: {query['refId']}"
                found.append((where, substituted(query["expr"]), query["legendFormat"]))
    return found


def rule_expressions() -> list[Query]:
    found = []
    for name in ("recording.yml", "alerts.yml"):
        for group in yaml.safe_load((RULES / name).read_text())["groups"]:
            found += [(rule.get("alert") or rule["record"], rule["expr"], "") for rule in group["rules"]]
    return found


def autoscaler_queries() -> list[Query]:
    """What KEDA asks for in the chart's renders. The labels that a cluster adds to every scrape are taken off."""
    found = []
    for path in sorted(RENDERS.glob("*.yaml")):
        for scaler in yaml.safe_load_all(path.read_text()):
            if scaler and scaler["kind"] == "ScaledObject":
                where = f"{path.stem}: {scaler['metadata']['name']}"
                for trigger in scaler["spec"]["triggers"]:
                    found.append((where, CLUSTER_LABELS.sub("", trigger["metadata"]["query"]), ""))
    return found


def substituted(expr: str) -> str:
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    return expr


def request(max_tokens: int) -> coordinator_pb2.GenerateRequest:
    message = coordinator_pb2.GenerateRequest(prompt="Once upon a time, far away, there was a king")
    message.sampling.temperature = 1.0
    message.sampling.max_tokens = max_tokens
    message.sampling.ignore_eos = True
    message.speculation.enabled = True
    return message


async def work(client: Client) -> None:
    """Send one request after another, whatever becomes of them."""
    while True:
        try:
            await client.complete(request(256))
        except SpecdecError:
            await asyncio.sleep(0)


async def work_under_constraints(client: Client) -> None:
    """The same, each held to another form, so that there is one to compile."""
    number = 0
    while True:
        number += 1
        message = request(32)
        message.sampling.constraint.regex = f"[a-z ]{{{number},{number + 20}}}"
        try:
            await client.complete(message)
        except SpecdecError:
            await asyncio.sleep(0)


async def work_over_http(url: str) -> None:
    """The same through the gateway."""
    async with httpx2.AsyncClient(base_url=url, timeout=60.0) as client:
        while True:
            body = {"prompt": "Once upon a time", "max_tokens": 32, "ignore_eos": True}
            with contextlib.suppress(httpx2.HTTPError):
                await client.post("/v1/completions", json=body)


GPU_ONLY = ("specdec_target_device_gap_seconds",)
"""Histograms that are exported everywhere and observed on GPUs."""


async def load(cluster: Cluster, url: str, server: PrometheusServer, redis_server: RedisServer) -> None:
    """Use all that the services count: requests, more than may wait, replicas and a Redis that go and come back."""
    async with Client(cluster.address) as client:
        workers = [asyncio.create_task(work(client)) for _ in range(MAX_RUNNING)]
        workers += [asyncio.create_task(work_over_http(url)), asyncio.create_task(work_under_constraints(client))]
        try:
            await asyncio.to_thread(server.wait_for, "specdec_target_verified_nodes_total > 0")
            await asyncio.to_thread(cluster.kill, "draft")
            await asyncio.to_thread(server.wait_for, 'specdec_coordinator_replicas{role="draft",state="ready"} == 0')
            await asyncio.to_thread(cluster.kill, "target")
            await asyncio.to_thread(start_again, cluster, "target", "draft")
            await asyncio.to_thread(server.wait_for, "rate(specdec_coordinator_session_reopens_total[1m])")
            redis_server.stop()
            await asyncio.to_thread(server.wait_for, "specdec_coordinator_store_up == 0")
            redis_server.start()
            await asyncio.to_thread(server.wait_for, "specdec_coordinator_store_up == 1")
            await asyncio.gather(*(client.complete(request(64)) for _ in range(BURST)), return_exceptions=True)
            for counter in ("draft_fallbacks", "stream_reconnects", "admission_rejects", "requests", "store_errors"):
                # Two samples at least, so that there is a rate.
                await asyncio.to_thread(server.wait_for, f"rate(specdec_coordinator_{counter}_total[1m])")
            await asyncio.to_thread(server.wait_for, "rate(specdec_gateway_output_tokens_total[1m]) > 0")
            await asyncio.to_thread(server.wait_for, "rate(specdec_draft_committed_tokens_total[1m]) > 0")
            for role in ("target", "draft"):
                compiled = f"rate(specdec_{role}_grammar_compile_seconds_count[1m]) > 0"
                await asyncio.to_thread(server.wait_for, compiled)
            # A scrape may time out where processors are short: look at a moment at which none had. Here, because the
            # services that were started again end with the loop's threads.
            server.moment_s = await asyncio.to_thread(server.wait_for, f"count(up == 1) == {len(JOBS)}")
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


@pytest.fixture(scope="module")
def redis_tls(tmp_path_factory: pytest.TempPathFactory) -> SecretVolume:
    """What Redis and its clients show each other, so that there are certificates to tell of."""
    return secure(tmp_path_factory.mktemp("tls") / "redis").volume


@pytest.fixture(scope="module")
def redis_server(redis_tls: SecretVolume, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), tls=redis_tls) as server:
        yield server


@pytest.fixture(scope="module")
def scraped(
    shipped_pair: ModelPair,
    redis_server: RedisServer,
    redis_tls: SecretVolume,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PrometheusServer]:
    """A Prometheus that has scraped a cluster under load."""
    folder = tmp_path_factory.mktemp("prometheus")
    ports = {job: free_port() for job in JOBS}
    with (
        start_cluster(
            shipped_pair,
            folder / "cluster",
            # A draft may come too late for each step of a small target; its own drafters are always in time.
            target_settings={"metrics_port": ports["target"], "drafters": ["ngram", "suffix"]},
            draft_settings={"metrics_port": ports["draft"]},
            coordinator_settings={
                "metrics_port": ports["coordinator"],
                "proposal_path": "relayed",  # its latency is measured there alone
                "max_running": MAX_RUNNING,
                "max_waiting": MAX_RUNNING,
                # More ask than there are places, all the time: what drafts count would end.
                "shed_speculation_after_s": None,
                "redis_url": redis_server.url,
                **redis_client(redis_tls),
                # Their page is made of those of two processes, and of what only their supervisor counts.
                "num_processes": 2,
            },
            gateway=True,
            gateway_settings={"metrics_port": ports["gateway"], "hold_s": 1.0},
        ) as cluster,
        prometheus_server(folder / "server", ports) as server,
    ):
        url = f"http://{cluster.services['gateway'].spec.address}"
        asyncio.run(asyncio.wait_for(load(cluster, url, server, redis_server), LOAD_S))
        yield server


@pytest.fixture(scope="module")
def exported(scraped: PrometheusServer) -> dict[str, dict[str, set[str]]]:
    """Values by label by metric, of what was scraped or recorded."""
    found: dict[str, dict[str, set[str]]] = {}
    for series in scraped.series('{__name__=~"specdec.+"}'):
        labels = found.setdefault(series.pop("__name__"), {})
        for label, value in series.items():
            labels.setdefault(label, set()).add(value)
    return found


def children(node: object) -> list[object]:
    """The expressions that an expression is made of."""
    if isinstance(node, promql_parser.Call):
        return list(node.args)
    names = ("lhs", "rhs", "expr", "param", "vector_selector")
    return [child for name in names if (child := getattr(node, name, None)) is not None]


def nodes(node: object) -> Iterator[object]:
    yield node
    for child in children(node):
        yield from nodes(child)


def wrong_names(expr: str, exported: dict[str, dict[str, set[str]]]) -> list[str]:
    """What an expression names that no service exports: metrics, labels, values of labels."""
    tree = promql_parser.parse(expr)
    wrong = []
    for selector in nodes(tree):
        if not isinstance(selector, promql_parser.VectorSelector):
            continue
        name = str(selector.name)
        labels = exported.get(name)
        if labels is None:
            wrong.append(name)
            continue
        for matcher in selector.matchers.matchers:
            if matcher.name not in labels:
                wrong.append(f"{name}: {matcher.name}")
            elif matcher.op == promql_parser.MatchOp.Equal and matcher.value not in labels[matcher.name]:
                wrong.append(f"{name}: {matcher.name}={matcher.value}")
    for aggregate in nodes(tree):
        if not isinstance(aggregate, promql_parser.AggregateExpr) or aggregate.modifier is None:
            continue
        made = set(labels_made(aggregate.expr))
        for inner in nodes(aggregate.expr):
            if isinstance(inner, promql_parser.VectorSelector):
                known = exported.get(str(inner.name), {}).keys() | made
                wrong += [f"{inner.name}: by {label}" for label in aggregate.modifier.labels if label not in known]
    return wrong


def labels_made(expr: object) -> Iterator[str]:
    """Labels that label_replace gives the series of an expression."""
    for node in nodes(expr):
        if isinstance(node, promql_parser.Call) and node.func.name == "label_replace":
            yield node.args[1].val


def test_every_query_and_rule_names_what_is_exported(exported: dict[str, dict[str, set[str]]]) -> None:
    wrong = {where: names for where, expr, _ in expressions() if (names := wrong_names(expr, exported))}
    assert wrong == {}


def expressions() -> list[Query]:
    return dashboard_queries() + rule_expressions() + autoscaler_queries()


def test_a_wrong_metric_label_or_value_would_be_noticed(exported: dict[str, dict[str, set[str]]]) -> None:
    assert wrong_names("sum(rate(specdec_target_misspelt_total[5m]))", exported)
    assert wrong_names("sum by (nothing) (rate(specdec_target_hits_total[5m]))", exported)
    made = 'label_replace(specdec_target_info, "tier", "target", "", "")'
    assert wrong_names(f"sum by (role) ({made})", exported) and not wrong_names(f"sum by (tier) ({made})", exported)
    assert wrong_names('specdec_coordinator_replicas{roll="draft"}', exported)
    assert wrong_names('specdec_coordinator_replicas{role="drafts"}', exported)
    assert not wrong_names('specdec_coordinator_replicas{role="draft"}', exported)


def test_every_dashboard_query_returns_data_with_the_labels_of_its_legend(scraped: PrometheusServer) -> None:
    wrong = {}
    for where, expr, legend in dashboard_queries():
        series = scraped.query(expr)
        finite = [one for one in series if one["value"][1] != "NaN"]
        labels = set(re.findall(r"{{(\w+)}}", legend))
        if any(name in expr for name in GPU_ONLY):
            assert series and not finite, f"{where}: there is no GPU here"
        elif not any(labels <= one["metric"].keys() for one in finite):
            wrong[where] = (expr, series)
    assert wrong == {}


def test_every_autoscaler_gets_one_number(scraped: PrometheusServer) -> None:
    queries = autoscaler_queries()
    assert {where.split(": ")[0] for where, _, _ in queries} >= {"everything", "production"}
    for where, expr, _ in queries:
        (number,) = scraped.query(expr)
        assert number["metric"] == {} and float(number["value"][1]) >= 0, where


def test_prometheus_evaluates_every_rule(scraped: PrometheusServer) -> None:
    rules = scraped.rules()
    assert len(rules) == len(rule_expressions())
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []


def test_the_job_is_the_service(scraped: PrometheusServer) -> None:
    assert {one["metric"]["job"] for one in scraped.query("up == 1")} == set(JOBS)
    jobs = {path["job_name"] for path in yaml.safe_load((RULES / "prometheus.yml").read_text())["scrape_configs"]}
    assert jobs == set(JOBS)
