"""The promise: the tokens with speculation are the tokens without, and greedy decoding is that of transformers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.client import Client, Completion
from specdec.commands.up.cluster import Cluster
from specdec.v1 import coordinator_pb2 as api
from tests.support.engine.architectures import CONFIGS, make_pair
from tests.support.pairwise import all_cases, pairwise_cases
from tests.support.services.clusters import start_cluster
from tests.support.services.faults import eventually
from tests.support.services.model_pair import ModelPair

pytestmark = pytest.mark.integration
torch.set_num_threads(1)  # the services need the cores

NEAR_TIE = 1e-4
MAX_TOKENS = 40
PROMPTS = [
    "def read_all(path):\n    with open(path) as file:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\n\nfor name in os.listdir('.'):\n",
    "# Return the largest of three numbers.\ndef largest(a, b, c):\n",
    "x",
    "    def test_empty(self):\n        self.assertEqual(",
    "try:\n    import json\nexcept ImportError:\n",
    "def fibonacci(n):\n    a, b = 0, 1\n    while a < n:\n        print(a)\n" * 3,
]
PARAMETERS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 1.0],
    "top_p": [None, 0.8],
    "min_p": [None, 0.05],
    "penalties": [False, True],
    "logit_bias": [False, True],
    "restrictions": [False, True],
    "min_tokens": [0, 12],
    "at_once": [1, 8],
    "n": [1, 3],
}


def case_name(case: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in case.items())


def requests_of(case: dict[str, Any], *, speculate: bool) -> list[api.GenerateRequest]:
    """The requests of a case, one per prompt that runs at once."""
    requests = []
    for seed in range(case["at_once"]):
        request = api.GenerateRequest(prompt=PROMPTS[seed % len(PROMPTS)])
        sampling = request.sampling
        sampling.temperature, sampling.seed, sampling.max_tokens = case["temperature"], seed, MAX_TOKENS
        sampling.min_tokens, sampling.n = case["min_tokens"], case["n"]
        sampling.ignore_eos = seed % 2 == 0
        if case["top_p"] is not None:
            sampling.top_p = case["top_p"]
        if case["min_p"] is not None:
            sampling.min_p = case["min_p"]
        if case["penalties"]:
            sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty = 1.2, 0.3, 0.2
        if case["logit_bias"]:
            sampling.logit_bias[40], sampling.logit_bias[17], sampling.logit_bias[101] = 3.0, -100.0, 1.5
        if case["restrictions"]:
            sampling.allowed_token_ids.extend(range(2, 250))
            sampling.bad_words.extend(["self", "return", "in range", "e"])
        request.speculation.enabled = speculate
        requests.append(request)
    return requests


async def run_case(client: Client, case: dict[str, Any], *, speculate: bool) -> list[Completion]:
    return list(await asyncio.gather(*(client.complete(r) for r in requests_of(case, speculate=speculate))))


def assert_equal(case: dict[str, Any], fast: list[Completion], plain: list[Completion]) -> None:
    for number, (with_draft, without) in enumerate(zip(fast, plain, strict=True)):
        assert len(with_draft.choices) == case["n"]
        assert with_draft.identity == without.identity, f"request {number} of {case_name(case)}"
        assert without.require_finished().stats.num_proposed == 0


IN_A_MERGE = "gemma2"
"""Caps and windows; `tests/unit/engine` has the others."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name == IN_A_MERGE else pytest.mark.long) for name in sorted(CONFIGS)],
)
def random_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp(request.param)
    # A random target is as fast as its draft: left to its cost model it would decode plainly.
    patience = {"hold_off_ms": 30}
    with start_cluster(make_pair(request.param, folder), folder / "logs", target_settings=patience) as cluster:
        yield cluster


async def check_cases(address: str, cases: list[dict[str, Any]], *, least_accepted: int) -> None:
    """Check all cases; again until so many tokens of drafts were accepted, which on a busy machine may be too late."""
    accepted = 0
    async with Client(address) as client:
        plain = [await run_case(client, case, speculate=False) for case in cases]

        async def is_enough() -> bool:
            nonlocal accepted
            for case, without in zip(cases, plain, strict=True):
                fast = await run_case(client, case, speculate=True)
                assert_equal(case, fast, without)
                accepted += sum(completion.require_finished().stats.num_accepted for completion in fast)
            return accepted > least_accepted

        await eventually(is_enough, f"more than {least_accepted} tokens are accepted")


@pytest.mark.smoke
@pytest.mark.timeout(300)
async def test_tokens_with_speculation_equal_tokens_without_on_the_shipped_pair(shipped_cluster: Cluster) -> None:
    await check_cases(shipped_cluster.address, pairwise_cases(PARAMETERS), least_accepted=100)


@pytest.mark.timeout(300)
async def test_tokens_with_speculation_equal_tokens_without_on_random_architectures(random_cluster: Cluster) -> None:
    await check_cases(random_cluster.address, pairwise_cases(PARAMETERS), least_accepted=100)


@pytest.mark.long
@pytest.mark.timeout(3000)
async def test_all_combinations_are_equal_on_the_shipped_pair(shipped_cluster: Cluster) -> None:
    await check_cases(shipped_cluster.address, all_cases(PARAMETERS), least_accepted=1000)


@pytest.mark.long
@pytest.mark.timeout(3000)
async def test_all_combinations_are_equal_on_random_architectures(random_cluster: Cluster) -> None:
    await check_cases(random_cluster.address, all_cases(PARAMETERS), least_accepted=1000)


def greedy_differences(
    tokenizer: Any, model: Any, prompt: str, token_ids: list[int], repetition_penalty: float
) -> tuple[int, float]:
    """First position at which transformers' greedy decoding differs, and its logit gap there; (-1, 0) when equal."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            repetition_penalty=repetition_penalty,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    expected = out.sequences[0, ids.shape[1] :].tolist()
    for position, (ours, theirs) in enumerate(zip(token_ids, expected, strict=False)):
        if ours != theirs:
            scores = out.scores[position][0]
            return position, float(scores[theirs] - scores[ours])
    assert len(token_ids) == len(expected)
    return -1, 0.0


async def check_greedy(cluster: Cluster, folder: Path) -> None:
    differences = []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    async with Client(cluster.address) as client:
        for prompt, penalty in zip(PROMPTS, itertools.cycle((1.0, 1.3)), strict=False):
            request = api.GenerateRequest(prompt=prompt)
            request.sampling.temperature, request.sampling.max_tokens = 0.0, MAX_TOKENS
            request.sampling.repetition_penalty = penalty
            ours = (await client.complete(request)).choices[0].token_ids
            position, gap = greedy_differences(tokenizer, model, prompt, ours, penalty)
            if position >= 0:
                differences.append(gap)
                assert gap < NEAR_TIE, f"{prompt!r} differs at {position} by {gap}"
    assert len(differences) <= 1, f"near ties {differences}"


@pytest.mark.timeout(300)
async def test_greedy_equals_transformers_generate_on_the_shipped_pair(
    shipped_cluster: Cluster, shipped_pair: ModelPair
) -> None:
    await check_greedy(shipped_cluster, shipped_pair.target)


@pytest.mark.timeout(300)
async def test_greedy_equals_transformers_generate_on_random_architectures(random_cluster: Cluster) -> None:
    settings = random_cluster.services["target"].spec.arguments
    folder = next(a.removeprefix("--model=") for a in settings if a.startswith("--model="))
    assert json.loads((Path(folder) / "config.json").read_text())["model_type"] in CONFIGS
    await check_greedy(random_cluster, Path(folder))
