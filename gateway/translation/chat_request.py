"""Translate a chat request to gRPC, with the checks across several fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.errors import invalid, unsupported
from specdec.gateway.api.foreign_fields import SWITCHES
from specdec.gateway.chat import reasoning, tool_calls
from specdec.gateway.chat.messages import check_tools, to_chat_messages
from specdec.gateway.chat.parsing import MessageParser, make_message_parser
from specdec.gateway.chat.tool_choice import ToolChoice, must_call
from specdec.gateway.translation.constraint import constraint_names
from specdec.gateway.translation.forced_calls import calls_tag, sole_function
from specdec.gateway.translation.format_or_calls import as_family_writes
from specdec.gateway.translation.sampling import FIELD_NAMES, check_stream, generate_request, sampling_params
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

CHAT_FIELD_NAMES = MappingProxyType(
    {
        **FIELD_NAMES,
        "logprobs": "top_logprobs",
        "tools_json": "tools",
        "template_variables_json": "chat_template_kwargs",
        "documents_json": "documents",
    }
)
"""HTTP field names by gRPC field names, where they differ."""


def chat_to_generate(
    request: ChatRequest,
    tool_parser: str = "none",
    reasoning_parser: str = "none",
    unenforced: list[str] | None = None,
) -> api.GenerateRequest:
    """The gRPC request without an id. `parsers` makes the parsers of its output.

    `unenforced` gets the paths of the schemas' keywords that are not enforced. Raises ApiError and InvalidRequest.
    """
    _check(request)
    unenforced = [] if unenforced is None else unenforced
    sampling = sampling_params(request, max_tokens=request.most_tokens, logprobs=request.num_logprobs)
    after = reasoning.end_of_thinking(reasoning_parser, _thinking(request))
    body = generate_request(request, sampling, after, unenforced)
    body.messages.CopyFrom(
        to_chat_messages(
            request.messages,
            request.tools,
            tool_choice=request.tool_choice,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            template_variables=_variables(request),
            documents=request.documents,
            chat_template=request.chat_template,
        )
    )
    if (markers := reasoning.think_markers(reasoning_parser)) is not None:
        body.think_markers.start, body.think_markers.end = markers
    if request.prediction is not None and request.prediction.text:
        body.prediction.text = request.prediction.text
    if forces_calls(request):
        _force_calls(request, tool_parser, body.sampling, after, unenforced)
    elif body.sampling.HasField("constraint"):
        held = as_family_writes(
            request,
            body.sampling.constraint,
            reasoning_parser=reasoning_parser,
            tool_parser=tool_parser,
            may_call=calls_tools(request),
        )
        body.sampling.constraint.CopyFrom(held)
    if body.sampling.constraint.after_token:
        body.sampling.constraint.opening_token = reasoning.opening_token(reasoning_parser)
    marks_calls = (
        calls_tools(request)
        and not lists_calls(request, tool_parser)
        and tool_calls.marks_are_special_tokens(tool_parser)
    )
    if request.skip_special_tokens is None and (marks_calls or reasoning.marks_are_special_tokens(reasoning_parser)):
        body.sampling.skip_special_tokens = False
    return body


def _variables(request: ChatRequest) -> dict[str, Any] | None:
    """Further variables of the template; None without any. An effort switches thoughts on, none off, as in vLLM."""
    effort, given = request.reasoning_effort, request.chat_template_kwargs or {}
    wanted: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort is not None and not given.keys() & set(SWITCHES):
        wanted |= dict.fromkeys(SWITCHES, effort != "none")
    return {**wanted, **given} or None


def calls_tools(request: ChatRequest) -> bool:
    """Whether the output may call tools."""
    return bool(request.tools) and request.tool_choice != "none"


def forces_calls(request: ChatRequest) -> bool:
    """Whether the output is constrained to calls."""
    return calls_tools(request) and must_call(request.tool_choice)


def lists_calls(request: ChatRequest, tool_parser: str) -> bool:
    """Whether the output is constrained to the list of calls that `ForcedCallsParser` reads for every family but
    harmony, whose calls are messages in channels.
    """
    return forces_calls(request) and tool_parser != "harmony"


def _force_calls(
    request: ChatRequest, tool_parser: str, sampling: api.SamplingParams, after: str, unenforced: list[str]
) -> None:
    if request.structured_outputs is not None:
        raise invalid("structured_outputs", "conflicts with a tool_choice that requires calls: send one of them")
    parallel, tools = request.parallel_tool_calls is not False, check_tools(request.tools)
    tag = calls_tag(tools, request.tool_choice, tool_parser, parallel=parallel, unenforced=unenforced)
    sampling.constraint.CopyFrom(pb.Constraint(structural_tag=tag, after_token=after))


def chat_field_names(request: ChatRequest, tool_parser: str) -> Mapping[str, str]:
    """`CHAT_FIELD_NAMES` of one request: some names depend on which of two fields it sent."""
    names = dict(CHAT_FIELD_NAMES)
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if forces_calls(request):
        choice = dict.fromkeys(("constraint", "constraint.after_token"), "tool_choice")
        return {**names, **choice, "constraint.structural_tag": "tools"}
    return {**names, **constraint_names(request)}


def parsers(request: ChatRequest, reasoning_parser: str, tool_parser: str) -> Callable[[], MessageParser]:
    """A function that makes a parser for each choice. Raises ApiError and InvalidRequest if tools cannot be read."""
    forced = lists_calls(request, tool_parser)
    if calls_tools(request) and tool_parser == "none" and not forced:
        raise unsupported("tools", "no form of tool calls is known for this model: set the gateway's tool_parser")
    choice: ToolChoice = request.tool_choice

    tools = check_tools(request.tools)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    sole = sole_function(tools, choice) if forced else ""

    def make() -> MessageParser:
        return make_message_parser(
            reasoning_parser,
            tool_parser,
            has_tools=bool(request.tools),
            tool_choice=choice,
            forced=forced,
            sole_function=sole,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            thinking=_thinking(request),
            schemas=schemas,
        )

    return make


def _thinking(request: ChatRequest) -> bool | None:
    """The request's template variable for thinking; None if it is not set."""
    told = _variables(request) or {}
    thinking = told.get("enable_thinking", told.get("thinking"))
    return thinking if isinstance(thinking, bool) else None


def echoed(request: ChatRequest) -> str:
    """The assistant's message that the answer continues, if the client wants an echo; otherwise ""."""
    last = request.messages[-1]
    content = last.get("content")
    is_wanted = request.echo and last.get("role") == "assistant" and isinstance(content, str)
    return str(content) if is_wanted else ""


def _check(request: ChatRequest) -> None:
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    check_stream(request)
