"""The assumptions behind a plan, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec.plan.deployment import CORE_PRICE, Question
from specdec.plan.inputs import step_times
from specdec.plan.inputs.traffic import Trace, Traffic
from specdec.plan.proof import MOST_RUNS
from specdec.plan.simulation.faults import SILENT_S
from specdec.plan.simulation.pair import Speculation
from specdec.plan.trial import MOST_SIMULATED, Trials


def with_context(question: Question, traffic: Traffic) -> Question:
    """The question with the mean prompt, and the mean context of a sequence: its prompt and half of its output."""
    prompt, output = traffic.mean_tokens
    context = max(1, round(prompt + output / 2))
    return replace(question, context=context, prompt_tokens=prompt, request_tokens=prompt + output)


def assumptions_of(question: Question, trials: Trials, speculation: Speculation, seeds: Sequence[int]) -> list[str]:
    """One sentence for each assumption."""
    prompt, output = trials.traffic.mean_tokens
    accepted = ", ".join(f"{share:.2f}" for share in question.acceptance)
    objectives = trials.objectives
    found = []
    if isinstance(trials.traffic, Trace) and trials.traffic.num_left_out:
        found.append(
            f"Of the recording {trials.traffic.num_left_out} requests are left out: they were refused or failed, and "
            "have no lengths."
        )
    found += [
        f"Traffic: {trials.traffic.per_s:.3g} requests per second; {prompt:.0f} tokens of prompt and {output:.0f} of "
        "output on average.",
        f"Objectives: {objectives.first_token_s * 1e3:g} ms to the first token and {objectives.inter_token_s * 1e3:g} "
        f"ms between tokens, 99th percentiles; to hold with {', '.join(trials.scopes) or 'nothing'} gone.",
        f"Acceptance by depth: {accepted}. Speculation: {speculation}.",
        f"A message between target and draft takes {question.delay_s * 1e3:g} ms; of {question.loss:.1%} a packet is "
        "lost and sent again.",
    ]
    if question.measured is not None:
        found.append("Step times are those that specdec tune measured; a node has one replica of each kind.")
    else:
        found += [
            f"Step times are a roofline: {step_times.BANDWIDTH_SHARE:.0%} of a GPU's bandwidth "
            f"({step_times.ATTENTION_SHARE:.0%} for keys and values), "
            f"{step_times.COMPUTE_SHARE:.0%} of its dense bfloat16 arithmetic, "
            f"{step_times.KERNEL_START_S * 1e6:.1f} us for each kernel, "
            f"{step_times.RAMP_S * 1e6:.0f} us for the ramps of each product, "
            f"{step_times.PLAIN_GAP_S * 1e6:.0f} us between plain steps, "
            f"{step_times.GAP_S * 1e6:.0f} us between others, "
            f"{step_times.GAP_OF_STREAM_S * 1e6:.0f} us for each further sequence, "
            f"{step_times.ALL_REDUCE_S * 1e6:.0f} us for a sum over ranks. No GPU was measured.",
            f"bfloat16, at a mean context of {question.context} tokens; keys and values take what weights leave of "
            "90 % of the memory.",
        ]
    prices = {device.name: device.price for device in (*question.devices, *question.draft_devices)}
    text = ", ".join(f"{name} {price:g}" for name, price in prices.items())
    found += [
        f"Prices in dollars per hour, of no seller: {text}; {CORE_PRICE:g} for a core.",
        "Coordinators and gateways are sized by their measured CPU time per verdict and token (docs/capacity.md).",
        f"A lost node or zone is noticed after {SILENT_S:g} s, in which its streams stand still, and does not come "
        "back; figures are of what begins later. Sessions of lost drafts decode plainly until others have them.",
        "Targets are spread over zones, and over two nodes at least.",
        f"Of more than {MOST_SIMULATED} targets as many are simulated, with their share of the traffic and of a node.",
        "All nodes of a draft's tree at one depth have one score: a real draft's scores let the target choose better.",
        f"Runs with {len(seeds)} seeds from {seeds[0]}, and up to {MOST_RUNS} where an interval crosses an objective; "
        "intervals are 95 % confidence intervals over them. An objective holds if the interval's worse end does.",
    ]
    return found
