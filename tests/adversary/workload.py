"""The requests that clients send: every way of sampling whose output is a function of the request alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from specdec.client import CompletedChoice, Completion
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.services.faults import PROMPT

FIRST_ORDINARY_TOKEN = 8
"""What is below may be special tokens."""
SEED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How long prompts and outputs are, in tokens."""

    prompt: tuple[int, int] = (3, 700)
    output: tuple[int, int] = (24, 320)
    vocabulary: int = 250


def make_requests(num: int, sizes: Sizes, seed: int = SEED) -> list[api.GenerateRequest]:
    """A fixed set of requests; the same for the same arguments."""
    rng = random.Random(seed)
    return [_request(rng, number, sizes) for number in range(num)]


def _request(rng: random.Random, number: int, sizes: Sizes) -> api.GenerateRequest:
    body = api.GenerateRequest()
    length = _between(rng, sizes.prompt)
    if number % 4 == 0:
        body.prompt = (PROMPT * (1 + length // len(PROMPT)))[: max(4, length)]
    else:
        tokens = [rng.randrange(FIRST_ORDINARY_TOKEN, sizes.vocabulary) for _ in range(length)]
        body.prompt_token_ids.token_ids.extend(tokens)
    sampling = body.sampling
    sampling.temperature = (0.0, 0.7, 1.0)[number % 3]
    sampling.seed = rng.randrange(2**63)
    sampling.max_tokens = _between(rng, sizes.output)
    sampling.n = rng.choice((1, 1, 2, 3))
    sampling.ignore_eos = rng.random() < 0.8
    if rng.random() < 0.3:
        sampling.logprobs = rng.randrange(4)
    if rng.random() < 0.15:
        sampling.prompt_logprobs = 1
    if rng.random() < 0.3:
        sampling.repetition_penalty, sampling.frequency_penalty = 1.1, 0.2
    if rng.random() < 0.2:
        sampling.top_p, sampling.top_k = 0.9, 40
    if rng.random() < 0.4:
        sampling.stop.extend(rng.sample(["e\n", "the", ")", "q%", "self."], 2))
        sampling.include_stop_in_output = rng.random() < 0.5
    if sampling.temperature == 0.0 and rng.random() < 0.3:
        body.speculation.verify_mode = pb.VERIFY_MODE_REJECTION
    return body


def _between(rng: random.Random, bounds: tuple[int, int]) -> int:
    """Short ones more often than long ones."""
    low, high = bounds
    return round(low * (high / low) ** rng.random())


def difference(completion: Completion, undisturbed: Completion) -> str | None:
    """What differs between an answer and the undisturbed run, or None. How often a stream was resumed may not show."""
    if completion.prompt_logprobs != undisturbed.prompt_logprobs:
        return "prompt log-probabilities differ"
    if completion.finished is None:
        return "the last chunk is missing"
    if sorted(completion.choices) != sorted(undisturbed.choices):
        return f"choices {sorted(completion.choices)} instead of {sorted(undisturbed.choices)}"
    for index, choice in completion.choices.items():
        other = undisturbed.choices[index]
        if (position := _first_difference(choice.token_ids, other.token_ids)) is not None:
            return f"choice {index}: tokens differ from position {position} on"
        if choice.text != other.text:
            return f"choice {index}: text differs: {choice.text!r} instead of {other.text!r}"
        if (position := _first_difference(_logprobs(choice), _logprobs(other))) is not None:
            return f"choice {index}: log-probabilities differ at position {position}"
        if [token.text for token in choice.tokens] != [token.text for token in other.tokens]:
            return f"choice {index}: texts of tokens differ"
        if _end(choice.finished) != _end(other.finished):
            return f"choice {index}: ended with {_end(choice.finished)} instead of {_end(other.finished)}"
    return None


def prefix_difference(completion: Completion, undisturbed: Completion) -> str | None:
    """What differs in a stream that its client has cut off, or None."""
    for index, choice in completion.choices.items():
        other = undisturbed.choices[index]
        position = _first_difference(choice.token_ids, other.token_ids[: len(choice.tokens)])
        if position is not None:
            return f"choice {index}, cut off: tokens differ from position {position} on"
        if not other.text.startswith(choice.text):
            return f"choice {index}, cut off: text differs"
    return None


def _end(finished: api.ChoiceFinished | None) -> tuple[object, ...]:
    if finished is None:
        return ("no end",)
    matched = finished.WhichOneof("matched")
    return (pb.FinishReason.Name(finished.reason), matched and getattr(finished, matched))


def _logprobs(choice: CompletedChoice) -> list[pb.PositionLogprobs | None]:
    return [token.logprobs if token.HasField("logprobs") else None for token in choice.tokens]


def _first_difference(ours: list, theirs: list) -> int | None:
    if len(ours) == len(theirs) and ours == theirs:
        return None
    for position, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return position
    return min(len(ours), len(theirs))
