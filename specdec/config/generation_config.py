"""Sampling parameters that a model's generation_config.json recommends, for requests that name none."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.sampling_limits import RANGES

FILE = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""Fields that are taken; all others, do_sample among them, are not: vLLM takes the same."""
_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(
        ("bad_words_ids", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias",
         "suppress_tokens", "exponential_decay_length_penalty", "min_new_tokens", "penalty_alpha", "stop_strings")
    ),
    "guidance_scale": 1.0, "min_length": 0, "no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
}  # fmt: skip
"""Fields by which transformers' `generate` chooses other tokens, with the values that change nothing beside null."""
_MOST_COUNT = 2**32 - 1
_logger = logging.getLogger(__name__)
_LEAST_COUNT = {"top_k": 0, "max_new_tokens": 1}


def sampling_defaults(choice: str, own: Mapping[str, Any], directory: Path) -> pb.SamplingDefaults:
    """The defaults of a model in `directory`.

    Args:
        choice: auto reads the model's file, none reads nothing, anything else is a folder with such a file.
        own: values of the operator, which take the place of the file's.
        directory: the model's folder.

    Raises:
        ValueError: the file is missing or unreadable, or a value is not allowed; names the file or the field.
    """
    told: dict[str, Any] = {}
    if choice != "none":
        file = (directory if choice == "auto" else Path(choice).expanduser()) / FILE
        if file.is_file():
            told = _read(file)
            _tell_ignored(file, told)
        elif choice != "auto":
            raise ValueError(f"generation_config: {file} does not exist")
    values = {**{name: told.get(name) for name in FIELDS}, **own}
    return defaults_of(values)


def defaults_of(values: Mapping[str, Any]) -> pb.SamplingDefaults:
    """The message of these values. Raises ValueError, which names the first field that is unknown or wrong."""
    defaults = pb.SamplingDefaults()
    for name, value in values.items():
        if name not in FIELDS:
            raise ValueError(f"{name} is not taken: name some of {', '.join(FIELDS)}")
        if value is None:
            continue
        if name == "top_k" and value == -1:
            value = 0
        if (fault := fault_of(name, value)) is not None:
            raise ValueError(f"{FILE}: {name} {fault}: correct it, or set override_generation_config")
        setattr(defaults, name, value)
    return defaults


def neutral_sampling() -> api.SamplingParams:
    """Parameters of a request that takes no defaults: it samples from the model's own distribution."""
    return api.SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)


def fault_of(name: str, value: Any) -> str | None:
    """The fault of a value, for people; None for an allowed one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"must be a number, not {value!r:.50}"
    if name in RANGES:
        return RANGES[name].fault_of(value)
    if not (isinstance(value, int) and _LEAST_COUNT[name] <= value <= _MOST_COUNT):
        return f"must be a whole number from {_LEAST_COUNT[name]} to {_MOST_COUNT}"
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}; correct it, or set generation_config to none") from error
    if not isinstance(told, dict):
        raise ValueError(f"{file} is not a JSON object; correct it, or set generation_config to none")
    return told


def _tell_ignored(file: Path, told: Mapping[str, Any]) -> None:
    ignored = sorted(name for name in _NEUTRAL if told.get(name) not in (None, [], {}, _NEUTRAL[name]))
    if ignored:
        names = ", ".join(ignored)
        _logger.warning(f"{file} has {names}, which requests must ask for; the file's are not taken")
