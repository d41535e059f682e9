"""Compares rejection verification with the target's own distribution, by Pearson's chi-square test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from specdec.config.drafter_options import DrafterOptions
from specdec.target_service.policy.gate import SpeculationGate
from specdec.v1 import common_pb2 as pb
from tests.support.engine.local_pair import MODELS, LocalPair, Propose, open_session, prompts
from tests.support.engine.outcomes import Outcome

REJECTION = pb.VERIFY_MODE_REJECTION
FALSE_ALARM_RATE = 1e-6
TOP_K = 3
NUM_DRAFTED = 3
HOLD_MS = 60_000.0  # every round waits for its draft


def rejection_session(prompt: list[int], **options: object) -> pb.OpenSession:
    options = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "body": {"max_draft_tokens": 4}, **options}
    return open_session(prompt, verify_mode=REJECTION, **options)  # type: ignore[arg-type]


Banned = Callable[[tuple[int, ...]], Sequence[int]]
"""From an output to the token ids that may not follow it."""


def exact_distribution(
    prompt: list[int], num_tokens: int, banned: Banned = lambda output: ()
) -> dict[tuple[int, ...], float]:
    """Joint probabilities of the first tokens at temperature 1 and top-k, from transformers' logits."""
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        prefixes = list(joint)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *prefix] for prefix in prefixes])).logits[:, -1].double()
            for row, prefix in enumerate(prefixes):
                logits[row, list(banned(prefix))] = -torch.inf
        values, ids = logits.topk(TOP_K)
        probs = values.softmax(-1)
        joint = {
            (*prefix, int(ids[row, k])): joint[prefix] * float(probs[row, k])
            for (row, prefix), k in product(enumerate(prefixes), range(TOP_K))
        }
    return joint


def chi_square_p_value(counts: Counter[tuple[int, ...]], probabilities: dict[tuple[int, ...], float]) -> float:
    """P-value of Pearson's test, with rare cells (fewer than 5 expected) pooled."""
    total = sum(counts.values())
    assert set(counts) <= set(probabilities), "a token outside the target's top-k"
    cells: list[tuple[float, float]] = []
    rare = [0.0, 0.0]
    for key, probability in probabilities.items():
        if total * probability >= 5:
            cells.append((counts[key], total * probability))
        else:
            rare[0] += counts[key]
            rare[1] += total * probability
    if rare[1] > 1:
        cells.append((rare[0], rare[1]))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return float(stats.chi2.sf(statistic, len(cells) - 1))


def sampled(
    pair: LocalPair,
    prompt: list[int],
    num_samples: int,
    mode: pb.VerifyMode.ValueType,
    gates: Callable[[], SpeculationGate] | None = None,
    own_draft: bool = False,
    drafters: Sequence[DrafterOptions] = (),
    use_draft: bool = True,
    prediction: Sequence[int] = (),
    method: pb.RejectionSampleMethod.ValueType = pb.REJECTION_SAMPLE_METHOD_STANDARD,
    propose: Propose | None = None,
    **sampling: Any,
) -> list[Outcome]:
    """Outcomes of short sessions with seeds of their own, 64 at once."""
    outcomes: list[Outcome] = []
    for first in range(0, num_samples, 64):
        pair.reset(own_draft=own_draft, drafters=drafters)
        opens = {
            str(seed): rejection_session(
                prompt,
                seed=seed,
                top_k=TOP_K,
                max_tokens=NUM_DRAFTED + 1,
                body={"max_draft_tokens": NUM_DRAFTED},
                **sampling,
            )
            for seed in range(first, min(first + 64, num_samples))
        }
        for body in opens.values():
            body.verify_mode, body.rejection_sample_method = mode, method
            body.prediction_token_ids.extend(prediction)
        gate = None if gates is None else gates()
        how = {
            "draft_turns": NUM_DRAFTED + 3,
            "hold_off_ms": HOLD_MS,
            "gate": gate,
            "use_draft": use_draft,
            "propose": propose,
        }
        outcomes += pair.run(opens, **how).values()  # type: ignore[arg-type]
    return outcomes


def check_distribution(
    pair: LocalPair,
    mode: pb.VerifyMode.ValueType,
    num_samples: int,
    gates: Callable[[], SpeculationGate] | None = None,
    own_draft: bool = False,
    banned: Banned = lambda output: (),
    least_share: float = 1 / 4,
    **how: Any,
) -> None:
    """Check that the first three tokens of sessions with seeds of their own have the target's distribution.

    `least_share`: least number of drafted tokens, and of recovered ones, among the second and third tokens, as a ratio
    to the number of sessions.
    """
    prompt = prompts()[1][:17]
    outcomes = sampled(pair, prompt, num_samples, mode, gates, own_draft, **how)
    origins = Counter(origin for outcome in outcomes for origin in outcome.origins[1:3])
    assert origins[pb.ORIGIN_DRAFT] > num_samples * least_share
    assert origins[pb.ORIGIN_RECOVERED] > num_samples * least_share
    counts = Counter(tuple(outcome.token_ids[:3]) for outcome in outcomes)
    assert chi_square_p_value(counts, exact_distribution(prompt, 3, banned)) > FALSE_ALARM_RATE
