"""docs/openai-clients.md: each client, unchanged, as the page says to run it, against real services."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from specdec.client import Client
from specdec.v1 import coordinator_pb2 as api
from tests.support.clients.page import INSTALLED, ROOT, Reader, sections

pytestmark = [pytest.mark.timeout(600)]
NUM_CHOICES = 4


@pytest.fixture
def code(url: str) -> str:
    """What the page's prompt is completed with."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.completions.create(model="target", prompt="def add(a, b):", max_tokens=24, temperature=0)
    return answer.choices[0].text


@pytest.fixture
def said(url: str) -> str:
    """What the page's message is answered with."""
    messages: Any = [{"role": "user", "content": "Add two numbers."}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="target", messages=messages, max_tokens=24, temperature=0)
    return answer.choices[0].message.content or ""


def test_the_page_installs_what_the_tests_install() -> None:
    pages, wanted = sections(), {}
    for name, folder in INSTALLED.items():
        lines = (ROOT / "tests" / "clients" / f"{folder}.txt").read_text().splitlines()
        wanted.setdefault(folder, set()).update(line for line in lines if line and line[0] not in "#-")
        assert set(pages[name].installs) <= wanted[folder], name
    said = {
        folder: {one for n, f in INSTALLED.items() if f == folder for one in pages[n].installs} for folder in wanted
    }
    assert said == wanted
    assert pages["openai"].installs == [f"openai=={openai.__version__}"]
    assert pages.keys() == {"curl", "openai", "Agents", "Chat templates", *INSTALLED}


def test_curl_lists_models_and_streams(reader: Reader, code: str) -> None:
    models, _, events = reader.run("curl").partition("data: ")
    assert json.loads(models)["data"][0]["id"] == "target"
    *chunks, done, rest = ("data: " + events).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert "".join(json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks) == code


def test_openai_completes_chats_and_takes_fields_of_ours(reader: Reader, code: str, said: str) -> None:
    printed = reader.run("openai")
    assert printed.startswith(f"{code}\n{said}\n")
    assert "'prefill'" in printed.splitlines()[-1]


def test_an_agent_says_what_a_chat_says(url: str, reader: Reader) -> None:
    messages: Any = [{"role": "user", "content": "Add two numbers."}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        chat = client.chat.completions.create(model="target", messages=messages, temperature=0, stop=["\n\n"])
    said = chat.choices[0].message.content or ""
    assert (chat.choices[0].finish_reason, bool(said.strip())) == ("stop", True)
    assert reader.run("openai-agents") == f"{said}\n"


def test_langchain_tells_what_openai_tells(reader: Reader, code: str, said: str) -> None:
    assert reader.run("LangChain") == f"{code}\n{code}\n{said}\n{said}\n24\n"


def test_llama_index_tells_what_openai_tells(reader: Reader, code: str, said: str) -> None:
    assert reader.run("LlamaIndex") == f"{code}\n{code}\n{said}\n{said}\n"


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """What lm-eval saved of each question."""
    (file,) = folder.glob(f"*/samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


async def scored(client: Client, question: str, choice: str, *, with_bos: bool) -> float:
    """The log-probability of a choice after a question, over gRPC."""
    context, whole = [
        await client.tokenize(text, add_special_tokens=with_bos) for text in (question, question + choice)
    ]
    request = api.GenerateRequest()
    request.prompt_token_ids.token_ids.extend(whole)
    request.sampling.max_tokens, request.sampling.prompt_logprobs = 1, 0
    told = (await client.complete(request)).prompt_logprobs
    assert told is not None
    # The first token has none.
    return sum(position.logprob for position in told.positions[len(context) - 1 :])


async def check_scores(folder: Path, client: Client, *, with_bos: bool) -> None:
    """Hold what lm-eval found against gRPC."""
    chosen = samples(folder, "choose")
    pairs = [(sample["doc"]["question"], choice) for sample in chosen for choice in sample["doc"]["choices"]]
    expected = [await scored(client, question, choice, with_bos=with_bos) for question, choice in pairs]
    told = [float(answer[0]) for sample in chosen for answer in sample["filtered_resps"]]
    assert len(told) == NUM_CHOICES
    assert told == pytest.approx(expected, abs=1e-3)


@pytest.mark.long
async def test_lm_eval_scores_choices_and_generates(reader: Reader, shipped_client: Client) -> None:
    reader.run("lm-eval", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    await check_scores(reader.folder / "scored", shipped_client, with_bos=True)
    assert [sample["acc"] for sample in samples(reader.folder / "scored", "choose")] == [1.0, 1.0]
    for folder in ("scored", "chatted"):
        answers = [sample["filtered_resps"] for sample in samples(reader.folder / folder, "finish")]
        assert [len(texts) for texts in answers] == [1, 1]
        assert all("\n" not in text for texts in answers for text in texts)
        assert any(text.strip() for texts in answers for text in texts)


@pytest.mark.long
async def test_lm_eval_takes_the_tokenizer_of_the_gateway(reader: Reader, shipped_client: Client) -> None:
    instead = ("tokenizer=models/target,add_bos_token=True", "tokenizer_backend=remote,tokenized_requests=True")
    reader.run("lm-eval", instead=instead, HF_DATASETS_OFFLINE="1")
    await check_scores(reader.folder / "scored", shipped_client, with_bos=False)


def test_llama_benchy_measures(reader: Reader) -> None:
    reader.run("llama-benchy")
    (measured,) = json.loads((reader.folder / "measured.json").read_text())["benchmarks"]
    assert (measured["prompt_size"], measured["response_size"]) == (64, 16)
    assert measured["tg_throughput"]["mean"] > 0


@pytest.mark.long
def test_guidellm_measures(reader: Reader) -> None:
    reader.run("guidellm")
    (benchmark,) = json.loads((reader.folder / "benchmarks.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)


@pytest.mark.long
def test_aiperf_measures(reader: Reader) -> None:
    reader.run("aiperf")
    (export,) = reader.folder.rglob("profile_export_aiperf.json")
    measured = json.loads(export.read_text())
    assert measured["request_count"]["avg"] == 8
    assert measured["usage_completion_tokens"]["avg"] == 8
    assert not measured["error_summary"]
    assert measured["total_spec_decode_steps"]["avg"] > 0


@pytest.mark.long
def test_vllm_bench_tells_acceptance(reader: Reader) -> None:
    printed = reader.run("vllm bench serve", HF_HUB_OFFLINE="1")
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in printed.splitlines())}
    assert (told["Successful requests"], told["Failed requests"]) == ("6", "0")
    assert float(told["Acceptance rate (%)"]) > 0
    assert int(told["Accepted tokens"]) > 0
