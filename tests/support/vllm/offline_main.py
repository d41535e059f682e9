"""vLLM without its server, executed in vLLM's own environment: offline_main.py MODEL SPECULATIVE_CONFIG.

Reads lines with JSON lists of prompts. Answers each with a line that begins with RESULT: output ids, seconds, and
vLLM's counters of speculation so far.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    model, speculation = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        disable_log_stats=False,
        speculative_config=speculation,
    )
    sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for line in sys.stdin:
        began_s = time.perf_counter()
        outputs = engine.generate(json.loads(line), sampling, use_tqdm=False)
        told: dict[str, Any] = {"seconds": time.perf_counter() - began_s}
        told["ids"] = [list(output.outputs[0].token_ids) for output in outputs]
        for metric in engine.get_metrics():
            if metric.name in ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"):
                told[metric.name.removeprefix("vllm:spec_decode_num_")] = metric.value
        sys.stdout.write(f"\nRESULT {json.dumps(told)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
