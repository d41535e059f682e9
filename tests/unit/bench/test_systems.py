"""How systems are compared, and how peers are asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.pairs import Pair, PairMember
from bench.plan import BenchPlan
from bench.prompts import Prompt, held_out_prompts
from bench.systems.compare import SystemRow, TokenDifference, lasting_prompts
from bench.systems.gguf_file import gguf_of
from bench.systems.http_peer import HttpPeer
from bench.systems.llama_cpp import LlamaCppDialect
from bench.systems.system import LeftOut, Outcome
from bench.systems.vllm import VllmDialect
from specdec.commands.measuring.requests import Sampling
from specdec.commands.up.plan import shipped_model

GREEDY = Sampling(max_tokens=3)


def row(name: str, *gaps: float) -> SystemRow:
    peer = HttpPeer(name, 0, LlamaCppDialect())
    return SystemRow(peer, differences=[TokenDifference(prompt=0, position=5, gap=gap) for gap in gaps])


def test_rows_with_other_tokens_are_void_unless_rounding_decided() -> None:
    assert row("llama.cpp").verdict(0.0, "coupled") == "equal"
    assert row("llama.cpp", 3e-5).verdict(0.0, "coupled").startswith("equal but for 1 near-ties")
    assert row("llama.cpp", 3e-5, 0.4).verdict(0.0, "coupled").startswith("VOID: differs at token 5")
    assert row("llama.cpp", float("inf")).verdict(0.0, "coupled").startswith("VOID")


def test_only_this_system_must_sample_the_same() -> None:
    assert row("llama.cpp", 0.4).verdict(1.0, "coupled") == "sampled on its own"
    assert row("specdec, synchronous", 0.4).verdict(1.0, "coupled").startswith("VOID")
    assert row("specdec, speculation", 0.4).verdict(1.0, "rejection") == "sampled on its own"


def test_what_bfloat16_rounds_on_a_gpu_makes_no_row_void() -> None:
    assert row("transformers, assisted", 0.2).verdict(0.0, "coupled", "cuda").startswith("equal but for 1 near-ties")
    assert row("transformers, assisted", 0.4).verdict(0.0, "coupled", "cuda").startswith("VOID")
    sampled = row("specdec, speculation", float("inf"))
    assert sampled.verdict(1.0, "coupled", "cuda") == "equal but for 1 places, where rounding may have decided"


class Completions(BaseHTTPRequestHandler):
    """Streams three tokens in both dialects, the first is the length of the prompt; two of them above temperature 0."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        tokens = [len(body["prompt"]), 8, 9]
        for token in tokens if body["temperature"] == 0 else tokens[:2]:
            event = {"tokens": [token], "choices": [{"token_ids": [token]}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b'data: {"stop": true, "tokens": [], "choices": []}\n\ndata: [DONE]\n\n')

    def log_message(self, *args: Any) -> None:
        """Nothing."""


@contextmanager
def serving() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("dialect", [LlamaCppDialect(), VllmDialect("m")], ids=["llama.cpp", "vLLM"])
async def test_peers_are_asked_in_their_own_dialect(dialect: LlamaCppDialect | VllmDialect) -> None:
    with serving() as port:
        peer = HttpPeer("peer", port, dialect, candidates=(2, 4))
        outcome = await peer.run([(5, 6), (5, 6, 7)], GREEDY)
        assert outcome.token_ids == [[2, 8, 9], [3, 8, 9]]
        tuned = await peer.tune([(5,)], 3)
        assert tuned.keys() == {"k = 2", "k = 4"}
        assert peer.setting == f"k = {peer.num_draft_tokens}"


async def test_a_peer_that_decodes_another_number_of_tokens_is_left_out() -> None:
    with serving() as port, pytest.raises(LeftOut, match="2 tokens instead of 3"):
        await HttpPeer("peer", port, LlamaCppDialect()).run([(5,)], Sampling(max_tokens=3, temperature=1.0))


class Ending(HttpPeer):
    """Answers that end before `max_tokens` after prompts of the lengths in `ends`."""

    ends: frozenset[int] = frozenset()

    async def run(self, prompts: Sequence[Prompt], sampling: Sampling) -> Outcome:
        assert sampling.stop_at_eos
        return Outcome(1.0, [[7] * (3 if len(prompt) in self.ends else sampling.max_tokens) for prompt in prompts])


@pytest.mark.parametrize("ends", [0, 1, 1000])
async def test_systems_are_compared_on_prompts_whose_answers_last(ends: int) -> None:
    shipped = PairMember(name="shipped", folder=Path(shipped_model("target")))
    plan = BenchPlan(
        pair=Pair(name="shipped", target=shipped, draft=shipped), num_prompts=2, batches=(1, 3), cores=(0,)
    )
    offered = held_out_prompts(plan.pair.target.folder, 100)
    reference = Ending("reference", 0, LlamaCppDialect())
    reference.ends = frozenset(map(len, offered[:ends]))
    found = await lasting_prompts(plan, reference)
    expected = [prompt for prompt in dict.fromkeys(offered) if len(prompt) not in reference.ends] or offered
    assert found == expected[:3]


def test_gguf_has_every_weight_and_turned_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}, "added_tokens": []}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    content = gguf_of(tmp_path / "model", tmp_path).read_bytes()
    weights = load_file(tmp_path / "model" / "model.safetensors")
    queries = weights["model.layers.0.self_attn.q_proj.weight"].float()
    turned = torch.stack([queries[head * 8 + (i % 2) * 4 + i // 2] for head in range(4) for i in range(8)])
    assert content.startswith(b"GGUF\x03\0\0\0")
    assert turned.numpy().tobytes() in content
    assert weights["model.embed_tokens.weight"].float().numpy().tobytes() in content
    assert b"blk.0.ffn_down.weight" in content


def test_gguf_is_for_llama_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(LeftOut):
        gguf_of(tmp_path, tmp_path)
