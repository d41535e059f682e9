"""Sampling parameters of requests that name none: the model's file, a folder's, or the operator's."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specdec.config import TargetSettings
from specdec.config.generation_config import sampling_defaults
from specdec.coordinator.replicas.compatibility import unsound
from specdec.engine.errors import ModelLoadError
from specdec.replica.worker.build import build_engine
from specdec.v1 import common_pb2 as pb
from tests.support.engine.tiny_models import save_tiny_model
from tests.support.for_each import for_each
from tests.support.scripted.model import identity

QWEN = {
    "do_sample": True, "eos_token_id": [1, 2], "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20,
    "top_p": 0.8, "min_p": None, "transformers_version": "5.0",
}  # fmt: skip


def folder(path: Path, config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def test_the_models_own_parameters_are_the_defaults_unless_the_operator_chooses(tmp_path: Path) -> None:
    model, other = folder(tmp_path / "model", QWEN), folder(tmp_path / "other", {"top_k": -1, "max_new_tokens": 9})
    own = pb.SamplingDefaults(repetition_penalty=1.05, temperature=0.7, top_k=20, top_p=0.8)
    assert sampling_defaults("auto", {}, model) == own
    assert sampling_defaults("none", {}, model) == pb.SamplingDefaults()
    assert sampling_defaults("none", {"min_p": 0.5}, model) == pb.SamplingDefaults(min_p=0.5)
    assert sampling_defaults(str(other), {}, model) == pb.SamplingDefaults(top_k=0, max_new_tokens=9)
    without = sampling_defaults("auto", {"top_k": None, "temperature": 0}, model)
    assert without == pb.SamplingDefaults(repetition_penalty=1.05, temperature=0, top_p=0.8)
    assert sampling_defaults("auto", {}, tmp_path) == pb.SamplingDefaults()  # has no such file
    with pytest.raises(ValueError, match=r"generation_config: .* does not exist"):
        sampling_defaults(str(tmp_path / "nowhere"), {}, model)


def test_fields_that_choose_other_tokens_at_transformers_are_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampling_defaults("auto", {}, folder(tmp_path, {**QWEN, "no_repeat_ngram_size": 0, "num_beams": 1}))
    assert not caplog.messages
    sampling_defaults("auto", {}, folder(tmp_path, {"suppress_tokens": [7], "no_repeat_ngram_size": 3}))
    (message,) = caplog.messages
    assert "generation_config.json has no_repeat_ngram_size, suppress_tokens" in message


@for_each(
    "config, told",
    [
        ({"temperature": -1}, "temperature -1"),
        ({"temperature": "0.7"}, "temperature must be a number"),
        ({"top_p": 0}, "top_p 0"),
        ({"top_p": float("nan")}, "top_p must be a finite number"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"top_k": 2**40}, "top_k must be a whole number"),
        ({"repetition_penalty": True}, "repetition_penalty must be a number"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number"),
        ("{", "cannot be read"),
        ([], "is not a JSON object"),
    ],
)
def test_a_file_that_cannot_be_taken_is_refused_by_its_field(config: Any, told: str) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.raises(ValueError, match=told):
        sampling_defaults("auto", {}, folder(Path(place), config))


def test_settings_are_checked_before_a_model_is_loaded() -> None:
    settings = TargetSettings(model="x", override_generation_config='{"temperature": 0.5}')  # type: ignore[arg-type]
    assert settings.override_generation_config == {"temperature": 0.5}
    for wrong in ('{"temprature": 1}', '{"top_p": 2}', "[1]", "{"):
        with pytest.raises(ValidationError):
            TargetSettings(model="x", override_generation_config=wrong)  # type: ignore[arg-type]


@for_each("name, value", [("temperature", float("nan")), ("top_p", 0.0), ("repetition_penalty", 1e9)])
def test_a_target_whose_defaults_are_impossible_is_refused(name: str, value: float) -> None:
    cause = unsound(identity(sampling_defaults=pb.SamplingDefaults(**{name: value})))  # type: ignore[arg-type]
    assert cause is not None and name in cause


def test_a_target_tells_its_models_parameters(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    folder(model, {**QWEN, "eos_token_id": 1})
    settings = TargetSettings(model=str(model), num_threads=1, num_blocks=8, override_generation_config={"top_k": 5})
    told = build_engine(settings).info.identity.sampling_defaults
    assert (told.temperature, told.top_k) == (0.7, 5)
    folder(model, {"temperature": "hot"})
    with pytest.raises(ModelLoadError, match="temperature must be a number"):
        build_engine(settings)
