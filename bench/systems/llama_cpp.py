"""llama.cpp's server, if `llama-server` is on the PATH: plain, and with the draft."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from bench.checkpoints import cache_folder
from bench.plan import BenchPlan
from bench.prompts import Prompt
from bench.systems.gguf_file import gguf_of
from bench.systems.http_peer import HttpPeer, start_server
from bench.systems.system import LeftOut
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.requests import Sampling
from specdec.commands.up.cluster import free_port

_PROMPT_TOKENS = 512


class LlamaCppDialect:
    """`/completion`, with token ids both ways and the temperature as the only sampler."""

    path = "/completion"

    def body(self, prompt: Prompt, sampling: Sampling, seed: int, num_draft_tokens: int | None) -> dict[str, Any]:
        """Body of a request."""
        speculation = {} if num_draft_tokens is None else {"speculative.n_max": num_draft_tokens}
        return {
            "prompt": prompt,
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "samplers": ["temperature"] if sampling.temperature > 0 else ["top_k"],
            "top_k": 1,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": False,
            **speculation,
        }

    def token_ids(self, event: Mapping[str, Any]) -> list[int]:
        """Tokens of one event; none of the last event, which is a summary."""
        return [] if event.get("stop") else list(event.get("tokens", []))


def start(plan: BenchPlan, stack: AsyncExitStack, progress: Progress) -> list[HttpPeer]:
    """Start two servers that end with the stack. Raises LeftOut."""
    binary = shutil.which("llama-server")
    if binary is None:
        raise LeftOut("llama.cpp: no llama-server on the PATH")
    if plan.device != "cpu":
        raise LeftOut("llama.cpp: only its CPU backend is compared")
    progress.tell("writing GGUF files for llama.cpp")
    target, draft = (gguf_of(model.folder, cache_folder()) for model in (plan.pair.target, plan.pair.draft))
    num_slots = max(plan.batches)
    context = num_slots * (plan.max_tokens + _PROMPT_TOKENS)
    threads = str(len(plan.cores))
    common = [binary, "-m", str(target), "-c", str(context), "-np", str(num_slots), "-t", threads, "-tb", threads,
              "-ctk", "f32", "-ctv", "f32", "-ngl", "0", "--host", "127.0.0.1"]  # fmt: skip
    drafting = ["--spec-type", "draft-simple", "-md", str(draft), "-td", threads, "-tbd", threads,
                "-ctkd", "f32", "-ctvd", "f32", "--spec-draft-n-max", str(max(plan.peer_tokens))]  # fmt: skip
    peers = []
    for name, options in (("llama.cpp, plain", []), ("llama.cpp, draft", drafting)):
        port = free_port()
        start_server(name, [*common, "--port", str(port), *options], port, plan.cores, stack, progress)
        peers.append(HttpPeer(name, port, LlamaCppDialect(), candidates=plan.peer_tokens if options else ()))
    return peers
