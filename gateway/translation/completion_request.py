"""From a completion request to one gRPC request per prompt, with the checks that take several fields."""

from __future__ import annotations

from types import MappingProxyType

from specdec.gateway.api.completions import CompletionRequest, Prompt
from specdec.gateway.api.errors import invalid
from specdec.gateway.translation.sampling import FIELD_NAMES, check_stream, generate_request, sampling_params
from specdec.v1 import coordinator_pb2 as api

COMPLETION_FIELD_NAMES = MappingProxyType(
    {**FIELD_NAMES, "prompt_token_ids.token_ids": "prompt", "prompt_token_ids": "prompt"}
)
"""Fields of the HTTP request by those of the gRPC request, where they differ."""


def completion_to_generate(request: CompletionRequest, most_prompts: int) -> list[api.GenerateRequest]:
    """The gRPC requests without ids, one per prompt. Raises ApiError."""
    prompts = request.prompts
    if len(prompts) > most_prompts:
        raise invalid("prompt", f"{len(prompts)} prompts are more than the limit of {most_prompts}")
    if request.best_of is not None and request.best_of != request.num_choices:
        raise invalid("best_of", "must be n, or absent", "unsupported_parameter")
    if request.echo and request.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "goes not together with echo")
    check_stream(request)
    # A request without output is one for the least there is, of which nothing is told.
    sampling = sampling_params(request, max_tokens=max(1, request.most_tokens), logprobs=request.logprobs)
    if request.most_tokens == 0:
        sampling.min_tokens = 0
    if tells_prompt_logprobs(request):
        sampling.prompt_logprobs = max(request.logprobs or 0, request.prompt_logprobs or 0)
    return [_with_prompt(request, sampling, prompt) for prompt in prompts]


def tells_prompt_logprobs(request: CompletionRequest) -> bool:
    """Whether the log-probabilities begin with those of the prompt."""
    return bool(request.echo) and request.logprobs is not None


def _with_prompt(request: CompletionRequest, sampling: api.SamplingParams, prompt: Prompt) -> api.GenerateRequest:
    body = generate_request(request, sampling)
    if isinstance(prompt, str):
        body.prompt = prompt
    else:
        body.prompt_token_ids.token_ids.extend(prompt)
    return body
