"""One request per feature of the API, whose answers depend on the request alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specdec.client import CompletedChoice, Completion
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.services.faults import PROMPT, make_request

NUM_TOKENS = 60
LONG_PROMPT_TOKENS = 1500
"""Tokens of a prompt that needs several steps."""


def every_request() -> dict[str, api.GenerateRequest]:
    """Requests by feature, equal at each call."""
    requests = {
        "greedy": make_request(max_tokens=NUM_TOKENS),
        "sampled, three choices": make_request(max_tokens=NUM_TOKENS, temperature=1.0, n=3),
        "truncated distributions": make_request(
            max_tokens=NUM_TOKENS, temperature=0.9, top_k=40, top_p=0.9, min_p=0.02, seed=2**63 + 11
        ),
        "penalties": make_request(
            max_tokens=NUM_TOKENS,
            temperature=0.8,
            repetition_penalty=1.2,
            presence_penalty=-0.5,
            frequency_penalty=0.3,
            logit_bias={97: -100.0, 101: 1.5},
        ),
        "log-probabilities": make_request(max_tokens=NUM_TOKENS, temperature=1.0, n=2, logprobs=4),
        "log-probabilities of a long prompt": make_request(max_tokens=8, prompt_logprobs=5, logprobs=0),
        "a long prompt, cut": make_request(max_tokens=NUM_TOKENS, temperature=1.0, truncate_prompt_tokens=400),
        "stop strings": make_request(max_tokens=2 * NUM_TOKENS, temperature=1.0, stop=["e", "q%", "\n"], seed=5),
        "a stop string that is kept": make_request(
            max_tokens=2 * NUM_TOKENS, temperature=1.0, stop=["e", "t"], include_stop_in_output=True, min_tokens=9
        ),
        "stop tokens": make_request(max_tokens=2 * NUM_TOKENS, temperature=1.0, stop_token_ids=list(range(60, 90))),
        "to the end of a sequence": make_request(
            max_tokens=4 * NUM_TOKENS, temperature=1.0, skip_special_tokens=False, logit_bias={1: 4.0}
        ),
        "a conversation": make_request(max_tokens=NUM_TOKENS, temperature=1.0),
        "no speculation": make_request(max_tokens=NUM_TOKENS, temperature=1.0),
        "few draft tokens": make_request(max_tokens=NUM_TOKENS, temperature=1.0),
        "rejection, greedy": make_request(max_tokens=NUM_TOKENS),
    }
    requests["greedy"].priority = -3
    requests["to the end of a sequence"].sampling.ignore_eos = False
    for name in ("log-probabilities of a long prompt", "a long prompt, cut"):
        ids = [10 + (7 * index + index * index) % 200 for index in range(LONG_PROMPT_TOKENS)]
        requests[name].prompt_token_ids.token_ids.extend(ids)
    chat = requests["a conversation"].messages.messages
    chat.add(role="system", content="Write code.")
    chat.add(role="user", content=PROMPT)
    requests["no speculation"].speculation.enabled = False
    requests["few draft tokens"].speculation.max_draft_tokens = 2
    requests["rejection, greedy"].speculation.verify_mode = pb.VERIFY_MODE_REJECTION
    return requests


def fields_set(request: api.GenerateRequest) -> set[str]:
    """Names of a request's set fields, such as `sampling.top_k`."""
    names = {field.name for field, _ in request.ListFields()}
    for part in ("sampling", "speculation"):
        names |= {f"{part}.{field.name}" for field, _ in getattr(request, part).ListFields()}
    return names


@dataclass(frozen=True, slots=True)
class Answer:
    """The part of an answer that depends on its request alone."""

    prompt_logprobs: api.PromptLogprobs | None
    choices: Mapping[int, Mapping[str, Any]]

    @classmethod
    def of(cls, completion: Completion) -> Answer:
        """The answer of a stream that has ended. Raises Internal if it has not."""
        completion.require_finished()
        return cls(completion.prompt_logprobs, {i: dict(_parts(c)) for i, c in sorted(completion.choices.items())})

    def difference(self, other: Answer) -> str | None:
        """Text about the first difference; None if there is none."""
        if self.prompt_logprobs != other.prompt_logprobs:
            return "the prompt's log-probabilities differ"
        if self.choices.keys() != other.choices.keys():
            return f"there are the choices {[*self.choices]} instead of {[*other.choices]}"
        for index, choice in self.choices.items():
            for part, ours in choice.items():
                theirs = other.choices[index][part]
                if ours != theirs:
                    where = _first_difference(ours, theirs)
                    return f"choice {index}, {part}{where}: {_short(ours)} instead of {_short(theirs)}"
        return None


def _parts(choice: CompletedChoice) -> Iterator[tuple[str, Any]]:
    finished = choice.finished or api.ChoiceFinished()
    matched = finished.WhichOneof("matched")
    yield "tokens", choice.token_ids
    yield "text", choice.text
    yield "texts of tokens", [token.text for token in choice.tokens]
    yield "log-probabilities", [token.logprobs if token.HasField("logprobs") else None for token in choice.tokens]
    yield "end", (pb.FinishReason.Name(finished.reason), matched and getattr(finished, matched))


def _first_difference(ours: Any, theirs: Any) -> str:
    pairs = zip(ours, theirs, strict=False)
    position = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
    return f" from {position} on"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."
