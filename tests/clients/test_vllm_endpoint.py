"""vLLM, unchanged, behind our services: as a draft's endpoint, and as a target that another engine decodes for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import httpx2
import pytest

from specdec.client import Client, Completion
from specdec.commands.up.cluster import free_port
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.clients.page import ROOT
from tests.support.services.clusters import MakeCluster
from tests.support.services.model_pair import ModelPair

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]
START_S = 300.0
PROMPTS = ("def fibonacci(n):\n    if n < 2:\n        return n\n", "import os\n\n\ndef read(path):\n")


@pytest.fixture(scope="module")
def url(shipped_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of vLLM on CPU with the shipped target."""
    port, log = free_port(), tmp_path_factory.mktemp("vllm") / "log"
    command = [ROOT / ".tools/clients/vllm/bin/vllm", "serve", shipped_pair.target, "--served-model-name", "target",
               "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port),
               "--max-model-len", "1024"]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def wait_for(health: str, process: subprocess.Popen[bytes]) -> None:
    ends_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < ends_s:
        try:
            if httpx2.get(health).is_success:
                return
        except httpx2.HTTPError:
            time.sleep(0.5)
    raise TimeoutError(f"vllm did not start (exit status {process.poll()})")


def request(prompt: str, temperature: float, *, speculate: bool = True, max_tokens: int = 64) -> api.GenerateRequest:
    made = api.GenerateRequest(prompt=prompt)
    made.sampling.temperature, made.sampling.seed, made.sampling.max_tokens = temperature, 7, max_tokens
    made.sampling.ignore_eos, made.speculation.enabled = True, speculate
    return made


async def ask(address: str, asked: api.GenerateRequest) -> Completion:
    async with Client(address) as client:
        return await client.complete(asked)


async def test_a_draft_behind_vllm_changes_no_token(
    url: str, make_cluster: MakeCluster, shipped_pair: ModelPair
) -> None:
    options = {"method": "openai_api", "base_url": url, "model": "target", "max_tokens": 64}
    cluster = make_cluster(
        pair=shipped_pair, draft_settings={"drafters": json.dumps([options])}, target_settings={"hold_off_ms": 100}
    )
    names: set[str] = set()
    for prompt in PROMPTS:
        for temperature in (0.0, 0.7):
            plain = await ask(cluster.address, request(prompt, temperature, speculate=False))
            drafted = await ask(cluster.address, request(prompt, temperature))
            assert drafted.identity == plain.identity
            tokens = drafted.choices[0].tokens
            names |= {token.drafter for token in tokens if token.origin == pb.ORIGIN_DRAFT}
    assert names == {"openai_api"}


@pytest.mark.parametrize("fields", ["prompt_logprobs", "echo"])
async def test_a_target_behind_vllm_says_what_vllm_says(
    fields: str, url: str, make_cluster: MakeCluster, shipped_pair: ModelPair
) -> None:
    endpoint = json.dumps({"base_url": url, "model": "target", "fields": fields, "sampled": "one_token_calls"})
    cluster = make_cluster(pair=shipped_pair, target_settings={"api": endpoint, "hold_off_ms": 100})
    num_accepted = 0
    for prompt in PROMPTS:
        body = {"model": "target", "prompt": prompt, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        own = httpx2.post(f"{url}/completions", json=body, timeout=60.0).json()["choices"][0]["text"]
        through = await ask(cluster.address, request(prompt, 0.0))
        assert through.choices[0].text == own
        num_accepted += through.require_finished().stats.num_accepted
    assert num_accepted > 0
    sampled = await ask(cluster.address, request(PROMPTS[0], 0.7, max_tokens=8))
    assert sampled.require_finished().usage.completion_tokens == 8
