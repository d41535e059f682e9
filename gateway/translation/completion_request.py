"""From a completion request to one gRPC request per prompt, with the checks that take several fields."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from specdec.gateway.api.completions import CompletionRequest, Prompt
from specdec.gateway.api.errors import invalid
from specdec.gateway.translation.sampling import (
    FIELD_NAMES,
    add_token_ids,
    check_stream,
    generate_request,
    sampling_params,
)
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest

COMPLETION_FIELD_NAMES = MappingProxyType(
    {**FIELD_NAMES, "prompt_token_ids.token_ids": "prompt", "prompt_token_ids": "prompt"}
)
"""Fields of the HTTP request by those of the gRPC request, where they differ."""
_MOST_COMMON_BYTES = 256 * 1024
"""Of parameters that each of several prompts takes along: all that sampling and constraints may have fit in."""


def completion_to_generate(request: CompletionRequest, most_prompts: int) -> PromptRequests:
    """The gRPC requests without ids, one per prompt. Raises ApiError and InvalidRequest."""
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
    common = generate_request(request, sampling)
    if len(prompts) > 1 and common.ByteSize() > _MOST_COMMON_BYTES:
        path = _largest_field(common)
        if path == "sampling":
            path = f"sampling.{_largest_field(common.sampling)}"
        raise InvalidRequest(path, f"parameters of several prompts are {_MOST_COMMON_BYTES} bytes at most")
    return PromptRequests(common, prompts)


def _largest_field(message: Message) -> str:
    def num_bytes(name: str) -> int:
        rest = type(message)()
        rest.CopyFrom(message)
        rest.ClearField(name)
        return message.ByteSize() - rest.ByteSize()

    return max((field.name for field, _ in message.ListFields()), key=num_bytes)


def tells_prompt_logprobs(request: CompletionRequest) -> bool:
    """Whether the log-probabilities begin with those of the prompt."""
    return bool(request.echo) and request.logprobs is not None


class PromptRequests(Sequence[api.GenerateRequest]):
    """One gRPC request per prompt, each made when it is asked for: all have the same parameters, which may be large."""

    def __init__(self, common: api.GenerateRequest, prompts: Sequence[Prompt]) -> None:
        """Make none yet. `common` is what all have."""
        self._common = common
        self._prompts = prompts
        self.request_id = ""
        """Of the only one; of several each has its number behind it."""

    def __len__(self) -> int:
        """How many prompts there are."""
        return len(self._prompts)

    def __getitem__(self, number: Any) -> Any:
        """The request of one prompt, made anew."""
        prompt, body = self._prompts[number], api.GenerateRequest()
        body.CopyFrom(self._common)
        if self.request_id:
            body.request_id = self.request_id if len(self) == 1 else f"{self.request_id}-{number}"
        if isinstance(prompt, str):
            body.prompt = prompt
        else:
            add_token_ids(body.prompt_token_ids, prompt)
        return body
