"""Usage and speculation statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specdec.v1 import coordinator_pb2 as api


def usage_of(finished: Iterable[api.Usage]) -> dict[str, Any]:
    """A `UsageAnswer` over all prompts of a request."""
    all_of = list(finished)
    prompt = sum(usage.prompt_tokens for usage in all_of)
    cached = sum(usage.cached_tokens for usage in all_of)
    told = {
        **usage_so_far(prompt, sum(usage.completion_tokens for usage in all_of)),
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if any(usage.HasField("accepted_prediction_tokens") for usage in all_of):
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": sum(usage.accepted_prediction_tokens for usage in all_of),
            "rejected_prediction_tokens": sum(usage.rejected_prediction_tokens for usage in all_of),
        }
    return told


def usage_so_far(num_prompt: int, num_output: int) -> dict[str, Any]:
    """A `UsageAnswer` while output comes."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


def metrics_of(stats: Sequence[api.SpeculationStats]) -> dict[str, Any]:
    """A `Metrics` over all prompts of a request."""
    steps = sum(one.num_verify_steps for one in stats)
    drafted = sum(one.num_proposed for one in stats)
    accepted = sum(one.num_accepted for one in stats)
    by_depth = _sums([one.accepted_by_depth for one in stats])
    return {
        "speculative_decoding": {
            "num_spec_steps": steps,
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "num_spec_tokens": max((len(one.verified_by_depth) for one in stats), default=0),
            "mean_acceptance_length": 1 + sum(by_depth) / steps if steps else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "acceptance_histogram": acceptance_histogram(steps, by_depth),
        }
    }


def acceptance_histogram(num_steps: int, accepted_by_depth: Sequence[int]) -> list[int]:
    """Steps that accepted exactly 0, 1, 2, ... tokens: acceptance at a depth includes all depths above."""
    reached = [num_steps, *accepted_by_depth]
    return [here - deeper for here, deeper in zip(reached, [*reached[1:], 0], strict=True)]


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    longest = max((len(row) for row in rows), default=0)
    return [sum(row[index] for row in rows if index < len(row)) for index in range(longest)]
