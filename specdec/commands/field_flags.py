"""Flags of a Generate request, made from the proto's descriptor: one per field that is no message."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import typer
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from specdec.v1 import coordinator_pb2

_CommandT = TypeVar("_CommandT", bound=Callable[..., None])

_PARTS = MappingProxyType({"sampling": "Sampling", "speculation": "Speculation", "": "Request"})
"""Panel in the help by the request's field; "" stands for the request itself."""
_NOT_FLAGS = frozenset({"prompt", "prompt_logprobs_in_parts", "with_steps"})
"""Fields that other flags or the client set."""
_FLAGS = MappingProxyType(
    {
        "n": ("--n", "-n"),
        "include_stop_in_output": ("--include-stop",),
        "enabled": ("--speculation",),
        "drafters": ("--drafters",),
        "logit_bias": ("--logit-bias",),
    }
)
"""Flags by field, where they differ from the field's name."""
_HELP = MappingProxyType(
    {
        "temperature": "Sampling temperature; 0 is greedy decoding; the server's default is 1.",
        "top_k": "Keep the k most likely tokens; 0 keeps all.",
        "top_p": "Keep the fewest most likely tokens that have this probability together.",
        "seed": "Seed of the random numbers; by default the server chooses one.",
        "max_tokens": "Most output tokens.",
        "stop": "A string that ends a choice.",
        "logprobs": "Show log-probabilities, with this many alternatives.",
        "prompt_logprobs": "Show log-probabilities of the prompt, with this many alternatives.",
        "n": "Number of choices.",
        "enabled": "Speculate, or decode plainly.",
        "verify_mode": "How the target verifies; by default as the server is set.",
        "max_draft_tokens": "Most draft tokens per step.",
        "drafters": "Only these drafters propose; draft_model is the draft.",
        "request_id": "An id of your own, for Abort and logs.",
    }
)
"""Help of the flags that people type most; shorter than the proto's comments."""
_METAVARS = MappingProxyType({"drafters": "NAME,...", "logit_bias": "ID=BIAS"})
_FLOATS = {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}
_RANGES = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
}
"""Least and largest value by type; protobuf's own errors do not tell them."""
_STUB_FIELD = r'(?m)^    (?:def )?(\w+)(?:\(self\) -> [^\n]+)?: ?[^\n]*\n +"""((?:[^"]|"(?!""))*)"""'


@dataclass(frozen=True, slots=True)
class FieldFlag:
    """The flag of one field."""

    part: str
    message: Descriptor
    field: FieldDescriptor

    @property
    def names(self) -> tuple[str, ...]:
        """Flags on the command line; a repeated field takes its values one by one."""
        name = self.field.name.removesuffix("s") if self.field.is_repeated else self.field.name
        return _FLAGS.get(self.field.name, (f"--{name.replace('_', '-')}",))

    @property
    def parameter(self) -> str:
        """The name of the command's parameter, hence of the flag's variable."""
        return self.names[0].removeprefix("--").replace("-", "_")

    def as_parameter(self) -> inspect.Parameter:
        """The parameter from which Typer makes the flag. None leaves the field to the server."""
        field = self.field
        names, metavar = self.names, _METAVARS.get(field.name) or "|".join(_enum_names(field)) or None
        help_text = _HELP.get(field.name) or _comments(self.message.name).get(field.name, "")
        if self._is_list:
            help_text += " May be repeated."
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            names = (f"{names[0]}/--no-{names[0].removeprefix('--')}",)
        option = typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel=_PARTS[self.part])
        one: Any = str if _map_parts(field) or field.enum_type is not None else _python_type(field)
        annotation: Any = Annotated[(types.GenericAlias(list, one) if self._is_list else one) | None, option]
        return inspect.Parameter(self.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def set(self, request: coordinator_pb2.GenerateRequest, value: Any) -> None:
        """Replace the field's value by the flag's.

        Raises:
            typer.BadParameter: the value does not fit the field; names the flag.
        """
        message: Message = getattr(request, self.part) if self.part else request
        name, flag = self.field.name, self.names[0]
        try:
            if _map_parts(self.field):
                entries = _entries(self.field, value, flag)
                message.ClearField(name)
                getattr(message, name).update(entries)
            elif self.field.is_repeated:
                values = value if self._is_list else [part.strip() for part in value.split(",") if part.strip()]
                message.ClearField(name)
                getattr(message, name).extend(values)
            elif self.field.enum_type is not None:
                setattr(message, name, _enum_number(self.field, value, flag))
            else:
                setattr(message, name, value)
        except (ValueError, TypeError) as error:
            told = str(error)
            if isinstance(value, int) and self.field.cpp_type in _RANGES:
                told = "{} is outside {}..{}".format(value, *_RANGES[self.field.cpp_type])
            raise typer.BadParameter(told, param_hint=flag) from error

    @property
    def _is_list(self) -> bool:
        return self.field.is_repeated and not _METAVARS.get(self.field.name, "").endswith(",...")


@cache
def field_flags() -> Mapping[str, FieldFlag]:
    """All flags by parameter."""
    request = coordinator_pb2.GenerateRequest.DESCRIPTOR
    flags = [
        FieldFlag(part, message, field)
        for part in _PARTS
        if (message := request.fields_by_name[part].message_type if part else request) is not None
        for field in message.fields
        if field.name not in _NOT_FLAGS and (field.message_type is None or _map_parts(field))
    ]
    # Flags that people type most come first; otherwise the proto's order holds.
    flags.sort(key=lambda flag: flag.field.name not in _HELP)
    return MappingProxyType({flag.parameter: flag for flag in flags})


def with_field_flags(*only: str) -> Callable[[_CommandT], _CommandT]:
    """Add flags, named by parameter (none: all), to a command that takes their values as `**fields`.

    The help lists them after the command's positional parameters.
    """

    def decorate(command: _CommandT) -> _CommandT:
        signature = inspect.signature(command, eval_str=True)
        first, last = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        own = signature.parameters.values()
        parameters = [
            *(one.replace(kind=last) for one in own if one.kind == first),
            *(flag.as_parameter() for name, flag in field_flags().items() if not only or name in only),
            *(one for one in own if one.kind == last),
        ]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def set_fields(request: coordinator_pb2.GenerateRequest, values: Mapping[str, Any]) -> None:
    """Put the given flags into a request; the server's defaults hold for the others.

    Raises:
        typer.BadParameter: a value that does not fit its field; names the flag.
    """
    for parameter, value in values.items():
        if value not in (None, []):
            field_flags()[parameter].set(request, value)


def _map_parts(field: FieldDescriptor) -> Sequence[FieldDescriptor]:
    """Key and value of a map; empty for other fields."""
    message = field.message_type
    return message.fields if message is not None and message.GetOptions().map_entry else ()


def _python_type(field: FieldDescriptor) -> type:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return bool
        case FieldDescriptor.CPPTYPE_STRING:
            return str
        case number:
            return float if number in _FLOATS else int


def _enum_names(field: FieldDescriptor) -> dict[str, int]:
    """Values by their names without the enum's prefix; 0, which leaves the choice to the server, has none."""
    values = () if field.enum_type is None else field.enum_type.values
    if not values:
        return {}
    prefix = values[0].name.removesuffix("UNSPECIFIED")
    return {value.name.removeprefix(prefix).lower(): value.number for value in values if value.number}


def _enum_number(field: FieldDescriptor, text: str, flag: str) -> int:
    names = _enum_names(field)
    if (number := names.get(text.lower())) is None:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(names)}", param_hint=flag)
    return number


def _entries(field: FieldDescriptor, texts: list[str], flag: str) -> dict[int, float]:
    """The entries of a map from KEY=VALUE texts. Raises typer.BadParameter."""
    key_type, value_type = (_python_type(part) for part in _map_parts(field))
    entries = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator:
            raise typer.BadParameter(f"{text!r} is not {_METAVARS[field.name]}", param_hint=flag)
        try:
            entries[key_type(key)] = value_type(value)
        except ValueError:
            message = f"{text!r} is not {_METAVARS[field.name]}: both are numbers"
            raise typer.BadParameter(message, param_hint=flag) from None
    return entries


@cache
def _comments(message: str) -> dict[str, str]:
    """The proto's comments on a message's fields, read from the generated stubs."""
    stub = resources.files("specdec.v1").joinpath("coordinator_pb2.pyi")
    if not stub.is_file():
        return {}
    _, _, behind = stub.read_text(encoding="utf-8").partition(f"\nclass {message}(")
    own = behind.partition("\nclass ")[0].partition("    def __init__(self")
    return {name: " ".join(text.split()) for name, text in re.findall(_STUB_FIELD, own[0])}
