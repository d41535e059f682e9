"""Requests to an endpoint that verify a block of draft tokens, and the tokens of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.drafting.endpoints.calls import ApiFault
from specdec.wire.sampling_params import SamplingParams

_ID = "token_id:"


def greedy_body(model: str, token_ids: Sequence[int], num_drafted: int, fields: str) -> dict[str, Any]:
    """Request of one call for the likeliest token after each of the last `num_drafted` + 1 tokens of a prompt.

    `fields`: "prompt_logprobs" or "echo", the way to ask for them.
    """
    body = _body(model, token_ids, temperature=0)
    if num_drafted and fields == "prompt_logprobs":
        body["prompt_logprobs"] = 1
    elif num_drafted:
        body |= {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    return body


def sampled_body(model: str, token_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """Request of one call for one token, sampled after a prompt."""
    body = _body(model, token_ids, temperature=params.temperature)
    if params.top_p < 1:
        body["top_p"] = params.top_p
    if params.top_k > 0:
        body["top_k"] = params.top_k
    if params.min_p > 0:
        body["min_p"] = params.min_p
    return body


def _body(model: str, token_ids: Sequence[int], temperature: float) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": temperature,
        # The target decides where a choice ends; an endpoint that omits its end token would return no token.
        "ignore_eos": True,
        "return_token_ids": True,
    }


def next_token(answer: Any, vocab_size: int) -> int:
    """The token that an answer generated. Raises ApiFault: it has none, or one outside the vocabulary."""
    token_ids = _choice(answer).get("token_ids")
    if not isinstance(token_ids, list) or not token_ids:
        raise ApiFault("no_token_ids")
    return _token(token_ids[-1], vocab_size)


def greedy_tokens(answer: Any, num_prompt_tokens: int, num_drafted: int, fields: str, vocab_size: int) -> list[int]:
    """The likeliest token after each of the last `num_drafted` + 1 tokens of a prompt, from an answer.

    Raises ApiFault: the answer lacks log-probabilities, ranks or token ids, or has them for other positions.
    """
    last = next_token(answer, vocab_size)
    if not num_drafted:
        return [last]
    choice = _choice(answer)
    if fields == "prompt_logprobs":
        positions = choice.get("prompt_logprobs")
        if not isinstance(positions, list) or len(positions) != num_prompt_tokens:
            raise ApiFault("no_prompt_logprobs")
        best = [_first_ranked(at) for at in positions[-num_drafted:]]
    else:
        logprobs = choice.get("logprobs")
        tops = logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None
        if not isinstance(tops, list) or len(tops) != num_prompt_tokens + 1:
            raise ApiFault("no_echo")
        best = [_likeliest(at) for at in tops[-num_drafted - 1 : -1]]
    return [*(_token(token_id, vocab_size) for token_id in best), last]


def _choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ApiFault("wrong_json")
    return choices[0]


def _first_ranked(at: Any) -> Any:
    """The id of rank 1 among a position's entries, which are keyed by id; None: the key is no id."""
    if isinstance(at, dict):
        for token_id, entry in at.items():
            if isinstance(entry, dict) and entry.get("rank") == 1:
                return int(token_id) if token_id.isdecimal() and len(token_id) < 10 else None
    raise ApiFault("no_rank")


def _likeliest(at: Any) -> Any:
    """The id of the greatest log-probability of a position, whose keys are `token_id:` and the id."""
    if not isinstance(at, dict) or not at or not all(isinstance(value, int | float) for value in at.values()):
        raise ApiFault("no_echo")
    name = max(at, key=lambda key: float(at[key]))
    number = name.removeprefix(_ID)
    if not name.startswith(_ID) or not number.isdecimal() or len(number) > 10:
        raise ApiFault("no_token_ids")
    return int(number)


def _token(token_id: Any, vocab_size: int) -> int:
    if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
        raise ApiFault("wrong_token")
    return token_id
