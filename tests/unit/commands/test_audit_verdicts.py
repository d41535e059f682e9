"""What an audit notices, of services that answer by the reference's own logits, bent in one way each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from specdec.commands.audit import sampled
from specdec.commands.audit.audit import AuditPlan, AuditResult, audit
from specdec.commands.audit.reference import Reference
from specdec.commands.audit.services import AuditImpossible, OpenAIServer, ServiceAnswer, _answer
from tests.support.engine.local_pair import MODELS, prompts

Bend = Callable[[torch.Tensor], torch.Tensor]
PROMPTS = [prompt[:12] for prompt in prompts()[:2]]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(MODELS / "target")


@dataclass
class Bent:
    """Samples from bent logits, each answer with numbers of its own."""

    reference: Reference
    bend: Bend
    name: str = "bent"
    tells_drafts: bool = True
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    async def complete(
        self, prompt: Sequence[int], *, num_tokens: int, temperature: float, seed: int, speculate: bool = True
    ) -> ServiceAnswer:
        tokens: list[int] = []
        rng = random.Random(seed)
        for _ in range(num_tokens):
            logits = self.bend(self.logits_after(prompt, tokens))
            if temperature == 0:
                tokens.append(int(logits.argmax()))
                continue
            cumulated = torch.softmax(logits.double() / temperature, dim=0).cumsum(0)
            tokens.append(min(int(torch.searchsorted(cumulated, rng.random(), right=True)), len(logits) - 1))
        return ServiceAnswer(token_ids=tokens, num_drafted=4, num_accepted=2)

    def logits_after(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        key = (*prompt, *tokens)
        if key not in self.known:
            self.known[key] = self.reference.logits(prompt, [[*tokens, 0]])[0][-1]
        return self.known[key]


async def found(reference: Reference, bend: Bend, **wishes: int) -> AuditResult:
    how = {"greedy_tokens": 4, "num_samples": 96, "sampled_tokens": 3, **wishes}
    return await audit(Bent(reference, bend), reference, AuditPlan(prompts=PROMPTS, **how))  # type: ignore[arg-type]


async def test_a_service_that_says_what_the_model_says_passes(reference: Reference) -> None:
    finding = await found(reference, lambda logits: logits)
    assert finding.is_lossless and finding.speculated
    assert finding.greedy.num_equal == finding.greedy.num_tokens == 8
    assert len(finding.fits) >= 3


async def test_a_sharper_distribution_is_noticed_where_greedy_answers_are_right(reference: Reference) -> None:
    finding = await found(reference, lambda logits: 1.4 * logits)
    assert not finding.greedy.faults
    assert finding.failed_fits and not finding.is_lossless


async def test_greedy_tokens_that_are_not_the_best_are_named_with_their_gap(reference: Reference) -> None:
    def second_best(logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, logits.argmax(), -100.0)

    finding = await found(reference, second_best, num_samples=0)
    assert len(finding.greedy.faults) == 8
    assert all(difference.gap > finding.greedy.tolerance for difference in finding.greedy.faults)
    assert not finding.is_lossless


async def test_a_near_tie_is_told_apart_from_a_fault(reference: Reference) -> None:
    def flipped(logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, logits.argmax(), -100.0)

    wishes = AuditPlan(prompts=PROMPTS, greedy_tokens=4, num_samples=0, tolerance=100.0)
    finding = await audit(Bent(reference, flipped), reference, wishes)
    assert len(finding.greedy.near_ties) == 8
    assert finding.is_lossless


async def test_answers_that_change_with_speculation_are_counted(reference: Reference) -> None:
    class Changing(Bent):
        async def complete(self, prompt: Sequence[int], *, speculate: bool = True, **how: object) -> ServiceAnswer:  # type: ignore[override]
            answer = await super().complete(prompt, speculate=speculate, **how)  # type: ignore[arg-type]
            return answer if speculate else ServiceAnswer(token_ids=[*answer.token_ids[:-1], 3])

    wishes = AuditPlan(prompts=PROMPTS, greedy_tokens=2, num_samples=16, sampled_tokens=2, repeats_plainly=True)
    finding = await audit(Changing(reference, lambda logits: logits), reference, wishes)
    assert finding.num_repeated == 4
    assert finding.num_changed == 4
    assert not finding.is_lossless


def test_a_right_sampler_fails_a_test_no_more_often_than_its_p_value_says() -> None:
    rng, probs = random.Random(3), [0.6, 0.2, 0.1, 0.05, 0.03, 0.02]
    small = 0
    for _ in range(400):
        draws = rng.choices(range(6), probs, k=120)
        fit = sampled.chi_square("", [draws.count(cell) for cell in range(6)], probs)
        assert fit is not None
        small += fit.p_value < 0.05
    assert small <= 36  # of 20 expected: 3.7 standard deviations


def test_counts_of_one_cell_are_no_test() -> None:
    assert sampled.chi_square("", [100, 0], [0.999, 0.001]) is None


def test_tokens_that_end_an_answer_are_one_outcome() -> None:
    probs = sampled.distribution(torch.zeros(1, 4), 1.0, (1, 3))
    assert probs[0].tolist() == pytest.approx([0.25, 0.5, 0.25, 0.0])


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"token_ids": [4, 5], "finish_reason": "length"}, ([4, 5], False)),
        ({"logprobs": {"tokens": ["token_id:4"]}, "finish_reason": "stop"}, ([4], True)),
    ],
)
def test_ids_are_read_in_either_form(choice: dict[str, object], expected: tuple[list[int], bool]) -> None:
    answer = _answer({"choices": [choice]})
    assert (answer.token_ids, answer.has_ended) == expected


@pytest.mark.parametrize(
    "content",
    [None, [], {}, {"choices": []}, {"choices": [7]}, {"choices": [{"text": "a"}]},
     {"choices": [{"token_ids": ["x"]}]}, {"choices": [{"logprobs": {"tokens": ["a"]}}]}],
)  # fmt: skip
def test_a_server_without_ids_is_refused_with_the_reason(content: object) -> None:
    with pytest.raises(AuditImpossible):
        _answer(content)


def test_an_address_that_is_no_url_is_refused() -> None:
    with pytest.raises(AuditImpossible, match="no URL"):
        OpenAIServer("file:///etc/passwd", "m", api_key=None, timeout_s=1.0)
