"""Translate a completion request to one gRPC request per prompt, with the checks across several fields."""

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
    {
        **FIELD_NAMES,
        "prompt_token_ids.token_ids": "prompt",
        "prompt_token_ids": "prompt",
        "token_ids": "prompt",
        "text": "prompt",
    }
)
"""HTTP field names by gRPC field names, where they differ; a prompt may also be converted on its own."""
_MOST_COMMON_BYTES = 256 * 1024
"""Bytes of parameters that are copied for each of several prompts: the largest sampling and constraints fit."""


def completion_to_generate(
    request: CompletionRequest, most_prompts: int, unenforced: list[str] | None = None
) -> PromptRequests:
    """The gRPC requests without ids, one per prompt.

    `unenforced` gets the paths of a schema's keywords that are not enforced. Raises ApiError and InvalidRequest.
    """
    prompts = request.prompts
    if len(prompts) > most_prompts:
        raise invalid("prompt", f"{len(prompts)} prompts exceed the limit of {most_prompts} (max_prompts)")
    if request.best_of is not None and request.best_of != request.num_choices:
        raise invalid("best_of", "must equal n or be absent", "unsupported_parameter")
    if request.echo and request.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "conflicts with echo: send one of them")
    check_stream(request)
    # max_tokens 0 asks for one token, which is not returned.
    most = None if request.most_tokens is None else max(1, request.most_tokens)
    sampling = sampling_params(request, max_tokens=most, logprobs=request.logprobs)
    if request.most_tokens == 0:
        sampling.min_tokens = 0
    if tells_prompt_logprobs(request):
        sampling.prompt_logprobs = max(request.logprobs or 0, request.prompt_logprobs or 0)
    common = generate_request(request, sampling, "", [] if unenforced is None else unenforced)
    if len(prompts) > 1 and common.ByteSize() > _MOST_COMMON_BYTES:
        path = _largest_field(common)
        if path == "sampling":
            path = f"sampling.{_largest_field(common.sampling)}"
        raise InvalidRequest(
            path, f"parameters of a request with several prompts must have at most {_MOST_COMMON_BYTES} bytes"
        )
    return PromptRequests(common, prompts)


def _largest_field(message: Message) -> str:
    def num_bytes(name: str) -> int:
        rest = type(message)()
        rest.CopyFrom(message)
        rest.ClearField(name)
        return message.ByteSize() - rest.ByteSize()

    return max((field.name for field, _ in message.ListFields()), key=num_bytes)


def tells_prompt_logprobs(request: CompletionRequest) -> bool:
    """Whether the answer's log-probabilities begin with the prompt's."""
    return bool(request.echo) and request.logprobs is not None


class PromptRequests(Sequence[api.GenerateRequest]):
    """One gRPC request per prompt, made when it is read: the common parameters may be large."""

    def __init__(self, common: api.GenerateRequest, prompts: Sequence[Prompt]) -> None:
        """Make no request yet. `common`: the fields of all requests."""
        self._common = common
        self._prompts = prompts
        self.request_id = ""
        """Id of a single request; of several, each gets a number after it."""

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._prompts)

    def __getitem__(self, number: Any) -> Any:
        """Make the request of one prompt."""
        prompt, body = self._prompts[number], api.GenerateRequest()
        body.CopyFrom(self._common)
        if self.request_id:
            body.request_id = self.request_id if len(self) == 1 else f"{self.request_id}-{number}"
        if isinstance(prompt, str):
            body.prompt = prompt
        else:
            add_token_ids(body.prompt_token_ids, prompt)
        return body
