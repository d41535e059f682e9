"""The same weights and prompts in transformers: plain `generate` and its own assisted generation, one request at a
time.

They run in this process, on as many threads as our target and draft engines have together, after the services are down.
"""

from __future__ import annotations

import itertools
import os
import time

from rich.console import Console
from rich.table import Table

from bench.decode import Plan, held_out_prompts
from bench.report import spread
from specdec.cli.local.cores import assign_cores
from specdec.cli.local.plan import shipped_model


def run(plan: Plan, console: Console) -> dict[str, object]:
    """Measure tokens per second, greedy, batch 1, alternating; prints a table."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    cores = assign_cores(sorted(os.sched_getaffinity(0)))
    num_threads = len(set(cores.target_engine) | set(cores.draft_engine))
    torch.set_num_threads(num_threads)
    dtype = torch.float32 if plan.device == "cpu" else torch.bfloat16
    target = AutoModelForCausalLM.from_pretrained(shipped_model("target"), dtype=dtype).to(plan.device).eval()
    draft = AutoModelForCausalLM.from_pretrained(shipped_model("draft"), dtype=dtype).to(plan.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(shipped_model("target"))
    assisted = {"assistant_model": draft}
    speeds: dict[str, list[float]] = {"generate": [], "assisted": []}
    with console.status("transformers generate and assisted generation"), torch.inference_mode():
        for repeat, prompt in itertools.product(range(plan.repeats), held_out_prompts(plan.num_prompts)):
            ids = tokenizer(prompt, return_tensors="pt").input_ids.to(plan.device)
            for name in ("generate", "assisted") if repeat % 2 == 0 else ("assisted", "generate"):
                kwargs = assisted if name == "assisted" else {}
                first_s = _time(target, ids, 1, {})
                total_s = _time(target, ids, plan.max_tokens, kwargs)
                speeds[name].append((plan.max_tokens - 1) / max(total_s - first_s, 1e-9))
    summary: dict[str, object] = {name: spread(values) for name, values in speeds.items()}
    summary["num_threads"] = num_threads
    table = Table(title=f"transformers on the same weights, greedy, batch 1, {num_threads} threads")
    for column in ("system", "tokens per s (median)"):
        table.add_column(column)
    for name, values in speeds.items():
        table.add_row(name, f"{spread(values)['median']:.1f}")
    console.print(table)
    return summary


def _time(model: object, ids: object, max_tokens: int, kwargs: dict[str, object]) -> float:
    started_s = time.perf_counter()
    model.generate(  # type: ignore[attr-defined]
        ids, do_sample=False, max_new_tokens=max_tokens, min_new_tokens=max_tokens, pad_token_id=0, **kwargs
    )
    return time.perf_counter() - started_s
