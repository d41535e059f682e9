"""Fields that clients of other servers send: what asks for nothing is left out, and other names become ours.

Only the outermost fields are looked at. What is left is checked as if the client had sent it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Union, get_args, get_origin

from specdec.gateway.api.fields import RequestModel

_MEANINGLESS = frozenset(
    {
        *("cache_prompt", "chat_id", "conversation_id", "id", "id_slot", "keep_alive", "plugins", "provider"),
        *("return_progress", "route", "session_id", "slot_id", "timings_per_token", "transforms", "usage", "user_id"),
    }
)
"""Fields of other servers that cannot change the output."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("dry_multiplier", "dynatemp_range", "mirostat", "n_probs", "top_a", "xtc_probability"), (0,)),
        **dict.fromkeys(("best_of", "length_penalty", "repeat_penalty", "tfs_z", "typical_p"), (1,)),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), (-1,)),
        **dict.fromkeys(("add_special_tokens", "early_stopping", "raw"), (False,)),
        "stop": ("", [], [""]),
        "top_n_sigma": (-1, 0),
    }
)
"""Values that ask for nothing, by field."""
_GUIDED: Mapping[str, str] = MappingProxyType(
    {
        **{f"guided_{form}": form for form in ("json", "regex", "choice", "grammar")},
        "guided_json_object": "json_object",
    }
)
"""Older names of vLLM, and those in structured_outputs."""
_THINKS = ("enable_thinking", "think", "thinking")
"""Names of the switch of thoughts at Qwen's, Ollama's and Anthropic's servers."""
_SWITCH: Mapping[str | bool, bool] = MappingProxyType(
    {True: True, False: False, "enabled": True, "adaptive": True, "disabled": False}
)
SWITCHES = ("enable_thinking", "thinking")
"""Variables with which templates switch thoughts."""
_LEAST_TOP_P = 1e-6
"""What top_p 0 means: the most likely token alone."""


def adapted(model: type[RequestModel], body: dict[str, Any]) -> dict[str, Any]:
    """The body with the fields of this server."""
    known, whole = {field.alias or name for name, field in model.model_fields.items()}, _whole_fields(model)
    meaningful = model.meaningful & known
    fields: dict[str, Any] = {}
    for name, value in body.items():
        if name not in known and (value is None or name in _MEANINGLESS):
            continue
        if name not in meaningful and any(_equals(value, one) for one in _NEUTRAL.get(name, ())):
            continue
        if isinstance(value, float) and name in whole and value.is_integer():
            value = int(value)
        fields[name] = value
    if fields.get("top_p") == 0 and not isinstance(fields["top_p"], bool):
        fields["top_p"] = _LEAST_TOP_P
    wanted = fields.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_object" and isinstance(wanted.get("schema"), dict):
        others = {name: value for name, value in wanted.items() if name != "schema"}  # llama.cpp's form
        fields["response_format"] = {**others, "type": "json_schema", "json_schema": {"schema": wanted["schema"]}}
    for name in [name for name in fields if name not in known]:
        _rename(name, fields, known)
    return fields


def _equals(value: Any, neutral: Any) -> bool:
    """Whether a value is this one, of whatever kind of number."""
    is_number = type(value) in (int, float) and type(neutral) is int
    return (is_number or type(value) is type(neutral)) and bool(value == neutral)


def _rename(name: str, fields: dict[str, Any], known: set[str]) -> None:
    """Give an unknown field its name here, if it has one and the value is of its kind."""
    value = fields[name]
    if name in _GUIDED and "structured_outputs" in known:
        del fields[name]
        _add(fields, "structured_outputs", {_GUIDED[name]: value})
    elif name == "reasoning" and "reasoning_effort" in known and isinstance(value, dict):
        _take_reasoning(fields, value)
    elif name in _THINKS and "chat_template_kwargs" in known:
        kind = value.get("type") if isinstance(value, dict) else value
        wanted = _SWITCH.get(kind) if isinstance(kind, str | bool) else None
        if wanted is not None:
            del fields[name]
            _add(fields, "chat_template_kwargs", dict.fromkeys(SWITCHES, wanted))


def _take_reasoning(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    """OpenRouter's and the Responses API's form."""
    if not wanted.keys() <= {"effort", "enabled", "exclude", "max_tokens", "summary"}:
        return
    del fields["reasoning"]
    if isinstance(effort := wanted.get("effort"), str):
        fields.setdefault("reasoning_effort", effort)
    if wanted.get("exclude") is True:
        fields.setdefault("include_reasoning", False)
    if isinstance(enabled := wanted.get("enabled"), bool):
        _add(fields, "chat_template_kwargs", dict.fromkeys(SWITCHES, enabled))


def _add(fields: dict[str, Any], name: str, more: dict[str, Any]) -> None:
    """Add to an object; what it has already stays."""
    given = fields.get(name)
    if given is None or isinstance(given, dict):
        fields[name] = {**more, **(given or {})}


@cache
def _whole_fields(model: type[RequestModel]) -> frozenset[str]:
    """Fields of whole numbers: some clients write all numbers as 8.0."""
    return frozenset(name for name, field in model.model_fields.items() if _types_of(field.annotation) >= {int})


def _types_of(annotation: Any) -> set[Any]:
    if get_origin(annotation) is Annotated:
        return _types_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return set().union(*map(_types_of, get_args(annotation)))
    return {annotation}
