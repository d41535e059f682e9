"""transformers on the same weights, in a process of its own: `transformers_worker TARGET DRAFT DEVICE CORES`.

Reads one JSON object a line from standard input and answers each with one. A task has `method` (generate, assisted,
lookup), `prompts`, `max_tokens`, `num_draft_tokens`, `temperature` and `seed`. An answer has `token_ids` and
`tokens_per_s`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, set_seed
from transformers.generation.streamers import BaseStreamer

from bench.systems.system import Clock

_PADDING = 0


class _Stopwatch(BaseStreamer):
    """Records the time of every token."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._saw_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Record tokens; the first call has the prompt."""
        if self._saw_prompt:
            self.clock.add(value.numel(), time.perf_counter())
        self._saw_prompt = True

    def end(self) -> None:
        """Nothing to do at the end."""


class Worker:
    """Target and draft, which decode tasks."""

    def __init__(self, target: str, draft: str, device: str) -> None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._target, self._draft = _load(target, dtype, device), _load(draft, dtype, device)
        self._device = device

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        """Decode a task; returns its answer."""
        prompts, max_tokens = task["prompts"], task["max_tokens"]
        longest = max(map(len, prompts))
        rows = [[_PADDING] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        options = self._options(task)
        if task["temperature"] > 0:
            set_seed(task["seed"])
            options |= {"do_sample": True, "temperature": task["temperature"], "top_k": 0, "top_p": 1.0}
        else:
            options["do_sample"] = False
        stopwatch = _Stopwatch()
        began_s = time.perf_counter()
        with torch.inference_mode():
            output = self._target.generate(
                torch.tensor(rows, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                max_new_tokens=max_tokens,
                streamer=stopwatch,
                **options,
            )
        elapsed_s = time.perf_counter() - began_s
        tokens = output[:, longest:].tolist()
        alone = len(prompts) == 1
        speed = stopwatch.clock.tokens_per_s if alone else sum(map(len, tokens)) / elapsed_s
        return {"token_ids": tokens, "tokens_per_s": speed}

    def _options(self, task: dict[str, Any]) -> dict[str, Any]:
        num_draft_tokens = task.get("num_draft_tokens")
        match task["method"]:
            case "assisted":
                own = self._draft.generation_config
                own.num_assistant_tokens = num_draft_tokens
                own.num_assistant_tokens_schedule = "constant"
                own.assistant_confidence_threshold = 0.0
                return {"assistant_model": self._draft}
            case "lookup":
                return {"prompt_lookup_num_tokens": num_draft_tokens}
        return {}


def _load(folder: str, dtype: torch.dtype, device: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(device).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None  # every system decodes past it
    model.generation_config.pad_token_id = _PADDING
    return model


def main() -> None:
    """Answer tasks until standard input ends."""
    target, draft, device, cores = sys.argv[1:5]
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        torch.set_num_threads(len(cores.split(",")))
    worker = Worker(target, draft, device)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        try:
            answer = worker.run(json.loads(line))
        except Exception as error:  # goes to the sender of the task
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
