"""Keys, prompts and outputs that can be told apart from all else, looked for in everything that processes write."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import yaml

from specdec.client import Client, ClientSettings
from specdec.commands.up.cluster import Cluster, free_port
from specdec.commands.up.plan import LocalPlan, plan_services
from specdec.v1 import coordinator_pb2 as api
from tests.support.servers.collector import Collector, collecting
from tests.support.servers.redis_server import RedisServer
from tests.support.services.clusters import TIMEOUTS
from tests.support.services.key_files import hash_key
from tests.support.services.model_pair import ModelPair

pytestmark = pytest.mark.timeout(600)

KEY = "canary-key-0123456789abcdefghijklmnopqrstuvwxyz"
WRONG_KEY = "canary-stranger-0123456789abcdefghijklmnopqrst"
PROMPT = "Xyzzycanary and plughcanary walk into a bar"
STOP = "stopcanary"
SECRET = "resume-secret-canary-of-the-tests"
BEARER = (("authorization", f"Bearer {KEY}"),)


@dataclass
class Written:
    """Processes that serve, and all places that they write to."""

    cluster: Cluster
    metrics_ports: list[int]
    collector: Collector
    redis: RedisServer

    def logs(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.cluster.log_dir.glob("*.log"))

    def pages(self) -> str:
        return "".join(
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
            for port in self.metrics_ports
        )

    def traces(self) -> str:
        return b"".join(self.collector.exports).decode("utf-8", "replace")

    def stored(self) -> str:
        """All keys and values, as far as a value has one type or another."""
        reads = {b"string": "get", b"hash": "hgetall", b"zset": "zrange"}
        found = []
        with self.redis.client() as client:
            for key in client.scan_iter():
                read: Any = getattr(client, reads[client.type(key)])
                found.append(repr((key, read(key, 0, -1) if client.type(key) == b"zset" else read(key))))
        return "".join(found)


@pytest.fixture(scope="module")
def written(tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """A cluster that writes as much as it can: logs at level debug, traces of everything, a journal in Redis."""
    folder = tmp_path_factory.mktemp("canaries")
    keys = {"keys": [{"id": "canary", "tenant": "canary-tenant", "sha256": hash_key(KEY)}]}
    (folder / "keys.yaml").write_text(yaml.safe_dump(keys))
    ports = [free_port() for _ in range(3)]
    with collecting() as collector, RedisServer(folder) as server:
        shared = {"log_level": "debug", "otlp_endpoint": collector.endpoint, "redis_url": server.url}
        coordinator = {"api_keys_file": folder / "keys.yaml", "resume_secret": SECRET, **shared}
        plan = LocalPlan(
            target_model=str(tiny_pair.target), draft_model=str(tiny_pair.draft), device="cpu", free_ports=True,
            coordinator_settings={**coordinator, "metrics_port": ports[0]},
            target_settings={**shared, "metrics_port": ports[1]}, draft_settings={**shared, "metrics_port": ports[2]},
        )  # fmt: skip
        services = plan_services(plan, environment={})
        with Cluster(services, log_dir=folder / "logs", timeouts=TIMEOUTS, api_key=KEY) as cluster:
            cluster.start()
            yield Written(cluster, ports, collector, server)


def forms(text: str) -> list[str]:
    """A text as it would be written: plain, in JSON, in base64."""
    return [text, json.dumps(text)[1:-1], base64.b64encode(text.encode()).decode().rstrip("=")[:-2]]


def errors_of(address: str) -> list[str]:
    """What clients are told that do everything wrong, with a key and without, about a prompt that is a secret."""
    told = []
    bad: list[dict[str, Any]] = [{"temperature": -1.0}, {"stop": [STOP] * 1000}, {"max_tokens": 0}, {"top_p": 7.0}]
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_stream("/specdec.v1.CoordinatorService/Generate")
        bodies = [api.GenerateRequest(prompt=PROMPT, sampling=api.SamplingParams(**fields)) for fields in bad]
        bodies.append(api.GenerateRequest(prompt=PROMPT, model="none", sampling=api.SamplingParams(max_tokens=1)))
        wrong = (("authorization", f"Bearer {WRONG_KEY}"),)
        for body in bodies:
            for metadata in (BEARER, wrong, (("authorization", KEY),), ()):
                try:
                    list(call(body.SerializeToString(), metadata=metadata))
                except grpc.RpcError as error:
                    trailers: Any = error.trailing_metadata()  # type: ignore[attr-defined]
                    told.append(f"{error} {trailers}")
    return told


async def test_no_key_prompt_or_output_is_in_anything_that_processes_write(written: Written) -> None:
    body = api.GenerateRequest(prompt=PROMPT, request_id="told")
    body.sampling.max_tokens, body.sampling.ignore_eos, body.sampling.seed = 24, True, 7
    body.sampling.stop.append(STOP)
    async with Client(written.cluster.address, ClientSettings(metadata=BEARER)) as client:
        completion = await client.complete(body)
        await client.tokenize(PROMPT)
    output = completion.choices[0].text
    assert len(output) > 8
    told = errors_of(written.cluster.address)
    assert len(told) == 20
    stored, pages = written.stored(), written.pages()
    written.cluster.stop()
    places = {
        "errors": "".join(told), "logs": written.logs(), "metrics": pages, "traces": written.traces(), "Redis": stored,
    }  # fmt: skip
    assert "request_id=told" in places["logs"]
    assert "specdec_target_steps_total" in places["metrics"]
    assert "specdec-target" in places["traces"]
    assert "told" in places["Redis"]
    secrets = [KEY, WRONG_KEY, hash_key(KEY), hash_key(WRONG_KEY), SECRET]
    texts = [PROMPT, *(word for word in PROMPT.split() if "canary" in word), output]
    for secret in [form for text in (*secrets, *texts) for form in forms(text)]:
        assert [place for place, text in places.items() if secret in text] == [], secret
    # Redis has stop strings with the request's parameters, as docs/security.md says, and errors quote a wrong value.
    for form in forms(STOP):
        assert [place for place in ("logs", "metrics", "traces") if form in places[place]] == []
