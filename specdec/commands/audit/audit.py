"""All checks of an audit and their result."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from specdec.commands.audit.greedy import GreedyFinding
from specdec.commands.audit.reference import Reference
from specdec.commands.audit.sampled import Fit, distribution, first_tokens, place, uniform
from specdec.commands.audit.services import AuditedService, ServiceAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPlan:
    """What to check."""

    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    greedy_tokens: int = 64
    """Tokens of each greedy answer."""
    temperature: float = 1.0
    """Temperature of sampled answers; top-k, top-p and min-p are off."""
    num_samples: int = 256
    """Sampled answers per prompt."""
    sampled_tokens: int = 8
    """Tokens of each sampled answer."""
    concurrency: int = 8
    tolerance: float = 1e-4
    """Largest difference of two logits that is a near-tie."""
    false_alarm_rate: float = 1e-4
    """Probability that a correct service fails any of the tests of sampling."""
    repeats_plainly: bool = False
    """Whether an eighth of the sampled answers must equal those without speculation."""


@dataclass(slots=True, kw_only=True)
class AuditResult:
    """Result of an audit."""

    service: str
    num_prompts: int
    greedy: GreedyFinding
    fits: list[Fit] = field(default_factory=list)
    threshold: float = 0.0
    """p-value below which a test fails: the false-alarm rate over the number of tests."""
    num_drafted: int = 0
    num_accepted: int = 0
    tells_drafts: bool = True
    num_repeated: int = 0
    """Sampled answers that were repeated without speculation."""
    num_changed: int = 0
    """Repeated answers with other tokens."""

    @property
    def failed_fits(self) -> list[Fit]:
        """Tests with a p-value below the threshold."""
        return [fit for fit in self.fits if fit.p_value < self.threshold]

    @property
    def is_lossless(self) -> bool:
        """Whether all checks passed."""
        return not (self.greedy.faults or self.failed_fits or self.num_changed)

    @property
    def speculated(self) -> bool | None:
        """Whether draft tokens were accepted during the audit; None: the service does not report it."""
        return self.num_accepted > 0 if self.tells_drafts else None

    def as_facts(self) -> dict[str, Any]:
        """For JSON."""
        facts = dataclasses.asdict(self)
        return facts | {"is_lossless": self.is_lossless, "speculated": self.speculated}


async def audit(
    service: AuditedService, reference: Reference, wishes: AuditPlan, tell: Callable[[str], None] = lambda what: None
) -> AuditResult:
    """Compare the service's answers with the reference.

    Raises AuditImpossible, or the typed errors of `specdec.wire.errors`.
    """
    finding = AuditResult(
        service=service.name,
        num_prompts=len(wishes.prompts),
        greedy=GreedyFinding(tolerance=wishes.tolerance),
        tells_drafts=service.tells_drafts,
    )
    tell("greedy answers")
    asked = [(prompt, 0) for prompt in wishes.prompts]
    answers = await _ask(service, wishes, asked, num_tokens=wishes.greedy_tokens, temperature=0.0)
    for number, (prompt, answer) in enumerate(zip(wishes.prompts, answers, strict=True)):
        _count(finding, answer)
        if answer.token_ids:
            finding.greedy.check(number, answer.token_ids, reference.logits(prompt, [answer.token_ids])[0])
    if wishes.num_samples:
        await _sampled(service, reference, wishes, finding, tell)
    return finding


async def _sampled(
    service: AuditedService, reference: Reference, wishes: AuditPlan, finding: AuditResult, tell: Callable[[str], None]
) -> None:
    fits: list[Fit | None] = []
    places: list[list[float]] = [[] for _ in range(wishes.sampled_tokens)]
    rng = random.Random(1)
    for number, prompt in enumerate(wishes.prompts):
        tell(f"sampled answers to prompt {number + 1} of {len(wishes.prompts)}")
        asked = [(prompt, number * wishes.num_samples + sample) for sample in range(wishes.num_samples)]
        answers = await _ask(service, wishes, asked, num_tokens=wishes.sampled_tokens, temperature=wishes.temperature)
        for answer in answers:
            _count(finding, answer)
        outputs = [_with_end(answer, reference.eos_token_ids, wishes.sampled_tokens) for answer in answers]
        outputs = [output for output in outputs if output]
        ends = reference.eos_token_ids if any(answer.has_ended for answer in answers) else ()
        if not outputs:
            continue
        first_probs: torch.Tensor | None = None
        remaining = iter(outputs)
        for batch in reference.batches(prompt, outputs):
            for output, logits in zip(islice(remaining, len(batch)), batch, strict=True):
                probs = distribution(logits, wishes.temperature, ends)
                first_probs = probs[0] if first_probs is None else first_probs
                for position, token in enumerate(output[1:], 1):
                    places[position].append(place(probs[position], token, rng))
                await asyncio.sleep(0)  # lets Ctrl-C interrupt
        if first_probs is not None:
            firsts = [output[0] for output in outputs]
            fits.append(first_tokens(f"first token of prompt {number + 1}", firsts, first_probs))
        if wishes.repeats_plainly:
            tell(f"answers without speculation, prompt {number + 1} of {len(wishes.prompts)}")
            some = asked[: max(1, wishes.num_samples // 8)]
            plain = await _ask(
                service,
                wishes,
                some,
                num_tokens=wishes.sampled_tokens,
                temperature=wishes.temperature,
                speculate=False,
            )
            finding.num_repeated += len(some)
            finding.num_changed += sum(
                list(one.token_ids) != list(other.token_ids) for one, other in zip(plain, answers, strict=False)
            )
    fits += [uniform(f"token {position + 1} of all prompts", some) for position, some in enumerate(places) if some]
    fits.append(uniform("all tokens but the first", [one for some in places for one in some]))
    finding.fits = [fit for fit in fits if fit is not None]
    finding.threshold = wishes.false_alarm_rate / max(1, len(finding.fits))


async def _ask(
    service: AuditedService,
    wishes: AuditPlan,
    asked: Sequence[tuple[Sequence[int], int]],
    *,
    num_tokens: int,
    temperature: float,
    speculate: bool = True,
) -> list[ServiceAnswer]:
    places = asyncio.Semaphore(wishes.concurrency)

    async def one(prompt: Sequence[int], seed: int) -> ServiceAnswer:
        async with places:
            return await service.complete(
                prompt, num_tokens=num_tokens, temperature=temperature, seed=seed, speculate=speculate
            )

    return await asyncio.gather(*(one(prompt, seed) for prompt, seed in asked))


def _count(finding: AuditResult, answer: ServiceAnswer) -> None:
    finding.num_drafted += answer.num_drafted
    finding.num_accepted += answer.num_accepted


def _with_end(answer: ServiceAnswer, ends: Sequence[int], most: int) -> list[int]:
    """An answer's tokens, with `ends[0]` for the end-of-sequence token, which servers leave out."""
    tokens = [ends[0] if token in ends and answer.has_ended else token for token in answer.token_ids]
    if answer.has_ended and ends and len(tokens) < most and (not tokens or tokens[-1] != ends[0]):
        tokens.append(ends[0])
    return tokens
