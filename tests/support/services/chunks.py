"""Chunks of a coordinator's stream, for tests of their receivers."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.gateway.upstream.vocabulary import TokenTexts
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api


def texts_of(words: Sequence[str]) -> TokenTexts:
    """A vocabulary whose token i is the i-th word."""
    return TokenTexts({index: word.encode() for index, word in enumerate(words)})


def started(num_prompt: int = 3) -> api.GenerateResponse:
    """The first chunk."""
    model = pb.ModelIdentity(name="the-model", numerics_id="float32/here", tokenizer_digest="t")
    return api.GenerateResponse(started=api.GenerateStarted(seed=1, model=model, num_prompt_tokens=num_prompt))


def delta(
    text: str, token_ids: Sequence[int] = (), *, index: int = 0, origins: Sequence[int] = (), logprobs: bool = False
) -> api.GenerateResponse:
    """A chunk of output. With `logprobs` each token's log-probability is -id, and its only alternative is token 0."""
    tokens = []
    for number, token_id in enumerate(token_ids):
        origin = origins[number] if number < len(origins) else pb.ORIGIN_DECODE
        token = api.OutputToken(id=token_id, text=f"<{token_id}>", origin=pb.Origin.ValueType(origin))
        if logprobs:
            top = [pb.TokenLogprob(token_id=0, logprob=-0.5)]
            token.logprobs.CopyFrom(pb.PositionLogprobs(logprob=-float(token_id), top=top))
        tokens.append(token)
    return api.GenerateResponse(delta=api.ChoiceDelta(index=index, text=text, tokens=tokens))


def choice_finished(
    reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOP,
    *,
    index: int = 0,
    stop_string: str | None = None,
    stop_token_id: int | None = None,
) -> api.GenerateResponse:
    """The end of a choice."""
    ended = api.ChoiceFinished(index=index, reason=reason, stop_string=stop_string, stop_token_id=stop_token_id)
    return api.GenerateResponse(choice_finished=ended)


def finished(num_prompt: int = 3, num_output: int = 4, num_cached: int = 2) -> api.GenerateResponse:
    """The last chunk."""
    usage = api.Usage(prompt_tokens=num_prompt, cached_tokens=num_cached, completion_tokens=num_output)
    stats = api.SpeculationStats(
        num_verify_steps=4, num_proposed=8, num_accepted=5, verified_by_depth=[4, 3, 1], accepted_by_depth=[3, 2, 0]
    )
    return api.GenerateResponse(finished=api.GenerateFinished(usage=usage, stats=stats))


def prompt_logprobs(token_ids: Sequence[int], start: int = 0) -> api.GenerateResponse:
    """Log-probabilities of a prompt's tokens, each -id, with token 0 as the only alternative."""
    positions = [
        pb.PositionLogprobs(logprob=-float(token_id), top=[pb.TokenLogprob(token_id=0, logprob=-0.5)])
        for token_id in token_ids[start == 0 :]
    ]
    told = api.PromptLogprobs(token_ids=token_ids, positions=positions, start_position=start)
    return api.GenerateResponse(prompt_logprobs=told)
