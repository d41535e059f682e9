"""From a chat request to the gRPC request, with the checks that take several fields."""

from __future__ import annotations

from types import MappingProxyType

from gateway.api.chat import ChatRequest
from gateway.api.errors import invalid
from gateway.translation.messages import conversation
from gateway.translation.sampling import FIELD_NAMES, check_stream, generate_request, sampling_params
from specdec.v1 import coordinator_pb2 as api

CHAT_FIELD_NAMES = MappingProxyType(
    {
        **FIELD_NAMES,
        "logprobs": "top_logprobs",
        "tools_json": "tools",
        "template_variables_json": "chat_template_kwargs",
    }
)
"""Fields of the HTTP request by those of the gRPC request, where they differ."""


def chat_to_generate(request: ChatRequest) -> api.GenerateRequest:
    """The gRPC request without an id. Raises ApiError."""
    _check(request)
    sampling = sampling_params(request, max_tokens=request.most_tokens, logprobs=request.num_logprobs)
    body = generate_request(request, sampling)
    body.messages.CopyFrom(conversation(request, request.messages, request.reasoning_effort))
    return body


def echoed(request: ChatRequest) -> str:
    """What the answer begins with: the assistant's words that it continues, if they are wanted."""
    last = request.messages[-1]
    content = last.get("content")
    is_wanted = request.echo and last.get("role") == "assistant" and isinstance(content, str)
    return str(content) if is_wanted else ""


def _check(request: ChatRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    check_stream(request)
