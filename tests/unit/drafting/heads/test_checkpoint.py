"""Files that are no head, or do not fit the target, are refused by name; nothing in them is executed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from specdec.config.drafter_options import (
    DFlashOptions,
    DSparkOptions,
    Eagle3Options,
    EagleOptions,
    HeadOptions,
    MedusaOptions,
    PEagleOptions,
)
from specdec.drafting.heads.checkpoint import HeadRefused
from specdec.drafting.heads.config import read_config
from specdec.drafting.heads.methods.registry import make_head
from specdec.drafting.heads.target import HeadTarget
from specdec.engine.errors import TapRefused
from tests.support.heads import checkpoints
from tests.support.heads.checkpoints import Sizes, Tensors, save
from tests.support.heads.targets import FIXTURES, fixture_target

SIZES = Sizes(vocab=40, target=16, width=16, inner=24, dim=8)
FEW = Sizes(vocab=40, target=16, width=16, inner=24, dim=8, draft=24)
Made = tuple[dict[str, Any], Tensors]
Change = Callable[[dict[str, Any], Tensors], None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> HeadTarget:
    return fixture_target(tmp_path_factory.mktemp("target"))


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda config, tensors: tensors.update({name: tensor})


def drop(name: str) -> Change:
    return lambda config, tensors: tensors.__delitem__(name)


def say(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


def with_nan(name: str) -> Change:
    return lambda config, tensors: tensors[name].fill_(torch.nan)


BAD: dict[str, tuple[type[HeadOptions], Made, Change, str]] = {
    "missing": (
        Eagle3Options,
        checkpoints.eagle3(SIZES),
        drop("layers.0.hidden_norm.weight"),
        "missing: layers.0.hidden",
    ),
    "extra": (Eagle3Options, checkpoints.eagle3(SIZES), put("layers.1.x", torch.zeros(1)), "not known: layers.1.x"),
    "misshaped": (
        Eagle3Options,
        checkpoints.eagle3(SIZES),
        put("fc.weight", torch.zeros(16, 32)),
        r"of another shape: fc.weight \(16, 32\), not \(16, 48\)",
    ),
    "not finite": (Eagle3Options, checkpoints.eagle3(SIZES), with_nan("norm.weight"), "no numbers: norm.weight"),
    "d2t missing": (Eagle3Options, checkpoints.eagle3(FEW), drop("d2t"), "missing: d2t, as 24 tokens stand for 40"),
    "d2t out of range": (
        Eagle3Options,
        checkpoints.eagle3(FEW),
        put("d2t", torch.full((24,), 30)),
        "outside the target's",
    ),
    "d2t twice": (Eagle3Options, checkpoints.eagle3(FEW), put("d2t", -torch.arange(24)), "names a token twice"),
    "d2t no integers": (Eagle3Options, checkpoints.eagle3(FEW), put("d2t", torch.zeros(24)), "not integers"),
    "t2d of another size": (Eagle3Options, checkpoints.eagle3(FEW), put("t2d", torch.ones(3)), "t2d is of shape"),
    "t2d that says something else": (
        Eagle3Options,
        checkpoints.eagle3(FEW),
        put("t2d", torch.ones(40)),
        "do not name the same tokens",
    ),
    "ids that are no list": (
        Eagle3Options,
        checkpoints.eagle3(SIZES),
        say(eagle_aux_hidden_state_layer_ids="all"),
        "eagle_aux_hidden_state_layer_ids is 'all'",
    ),
    "another method": (EagleOptions, checkpoints.eagle3(SIZES), say(), "holds a head of method eagle3"),
    "another activation": (
        EagleOptions,
        checkpoints.eagle(SIZES),
        say(hidden_act="gelu"),
        "hidden_act gelu is not supported",
    ),
    "a flag that is none": (
        Eagle3Options,
        checkpoints.eagle3(SIZES),
        say(norm_before_residual="yes"),
        "norm_before_residual is 'yes'",
    ),
    "no mask": (PEagleOptions, checkpoints.peagle(SIZES), drop("mask_hidden"), "missing: mask_hidden"),
    "no mask token": (PEagleOptions, checkpoints.peagle(SIZES), say(mask_token_id=None), "mask_token_id is missing"),
    "a mask token outside": (
        DFlashOptions,
        checkpoints.dflash(SIZES),
        say(mask_token_id=40),
        "outside the vocabulary of 40",
    ),
    "sinks": (
        DFlashOptions,
        checkpoints.dflash(SIZES),
        say(dflash_config={"attention_sink_bias": True}),
        "not supported",
    ),
    "an unknown Markov head": (
        DSparkOptions,
        checkpoints.dspark(SIZES),
        say(markov_head_type="deep"),
        "markov_head_type deep",
    ),
    "a Markov head that lacks a part": (
        DSparkOptions,
        checkpoints.dspark(SIZES),
        drop("markov_head.markov_w2.weight"),
        "missing: markov_head.markov_w2.weight",
    ),
    "a Medusa without last matrices": (
        MedusaOptions,
        checkpoints.medusa(SIZES),
        drop("0.1.weight"),
        "missing: 0.1.weight",
    ),
    "a Medusa that lacks one": (MedusaOptions, checkpoints.medusa(SIZES), drop("2.1.weight"), "missing: 2.1.weight"),
    "a Medusa of another model": (
        MedusaOptions,
        checkpoints.medusa(Sizes(vocab=50, target=16)),
        say(),
        "names 50 tokens, the target 40",
    ),
    "a Medusa of another width": (
        MedusaOptions,
        checkpoints.medusa(Sizes(vocab=40, target=24)),
        say(),
        r"0.0.linear.weight \(24, 24\), not \(16, 16\)",
    ),
    "a token map that names one twice": (
        MedusaOptions,
        checkpoints.old_medusa(FEW),
        put("token_map", torch.zeros(24, dtype=torch.int64)),
        "token_map names a token twice",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said_by_name(what: str, target: HeadTarget, tmp_path: Path) -> None:
    kind, (config, tensors), change, reason = BAD[what]
    config, tensors = dict(config), Tensors(0) | tensors  # type: ignore[assignment]
    tensors = {name: value.clone() for name, value in tensors.items()}  # type: ignore[assignment]
    change(config, tensors)
    save(tmp_path, config, tensors)
    with pytest.raises(HeadRefused, match=f"^drafters: {kind.model_fields['method'].default}: .*{reason}"):
        make_head(kind(model=str(tmp_path)), target)  # type: ignore[call-arg]


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


def test_a_pickled_file_is_read_as_tensors_only(
    target: HeadTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for payload in (pickle.dumps(Malicious()), b"no pickle"):
        (tmp_path / "medusa_lm_head.pt").write_bytes(payload)
        with pytest.raises(HeadRefused, match="more than tensors, or is damaged"):
            make_head(MedusaOptions(model=str(tmp_path)), target)
    torch.save({"0.0.linear.weight": Malicious()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(HeadRefused, match="more than tensors"):
        make_head(MedusaOptions(model=str(tmp_path)), target)
    assert not (tmp_path / "executed").exists()


def test_code_that_lies_beside_a_config_is_not_executed(target: HeadTarget, tmp_path: Path) -> None:
    config, tensors = checkpoints.eagle3(SIZES)
    save(tmp_path, {**config, "auto_map": {"": "config.Eagle3SpeculatorConfig"}}, tensors)
    (tmp_path / "config.py").write_text("raise SystemExit")
    assert make_head(Eagle3Options(model=str(tmp_path)), target).layer_ids == (1, 2, 3)


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_a_config_that_is_none_is_refused(text: str, target: HeadTarget, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(HeadRefused, match=r"config\.json"):
        make_head(EagleOptions(model=str(tmp_path)), target)


def test_a_folder_without_tensors_or_a_folder_that_is_not_there_is_refused(target: HeadTarget, tmp_path: Path) -> None:
    with pytest.raises(HeadRefused, match=r"no config\.json can be read"):
        make_head(EagleOptions(model=str(tmp_path)), target)
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(HeadRefused, match="neither"):
        make_head(EagleOptions(model=str(tmp_path)), target)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(HeadRefused, match="safetensors"):
        make_head(EagleOptions(model=str(tmp_path)), target)


@pytest.mark.parametrize("folder", sorted(path.name for path in FIXTURES.iterdir() if (path / "config.json").exists()))
def test_folders_that_speculators_wrote_load_as_they_are(folder: str, target: HeadTarget) -> None:
    method = folder.split("-")[0].split(".")[0]
    kinds: dict[str, type[HeadOptions]] = {
        "eagle3": Eagle3Options,
        "peagle": PEagleOptions,
        "dflash": DFlashOptions,
        "dspark": DSparkOptions,
    }
    folder = "eagle3.1" if folder == "eagle3.1" else folder
    head = make_head(kinds[method](model=str(FIXTURES / folder)), target)  # type: ignore[call-arg]
    assert head.name == method
    assert head.layer_ids == ((1, 2, 3) if method in ("eagle3", "peagle") else (1, 3))


IDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "speculators, EAGLE": ({"eagle_aux_hidden_state_layer_ids": [2, 8, 13]}, (2, 8, 13)),
    "SpecForge": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 7, 12]}}, (2, 8, 13)),
    "speculators, blocks": ({"aux_hidden_state_layer_ids": [2, 8]}, (2, 8)),
    "z-lab": ({"dflash_config": {"target_layer_ids": [1, 7]}}, (2, 8)),
    "z-lab, flat": ({"target_layer_ids": [1, 7]}, (2, 8)),
}


@pytest.mark.parametrize("source", IDS)
def test_ids_of_layers_are_read_as_their_writers_mean_them(source: str) -> None:
    values, expected = IDS[source]
    assert read_config(values).taps(None, 16) == expected
    assert read_config(values).taps((3, 4), 16) == (3, 4)  # the operator knows better


def test_ids_that_nobody_names_are_guessed_with_a_warning() -> None:
    with capture_logs() as logs:
        assert read_config({}).taps(None, 16) == (2, 8, 13)
    assert [entry["event"] for entry in logs] == ["head_layers_guessed"]


def test_a_head_that_reads_layers_that_the_target_has_not_is_refused(target: HeadTarget, tmp_path: Path) -> None:
    save(tmp_path, *checkpoints.eagle3(SIZES))
    with pytest.raises(TapRefused, match="layer_ids: 9"):
        make_head(Eagle3Options(model=str(tmp_path), layer_ids=(1, 2, 9)), target)


def test_whether_the_residual_is_normed_is_read_as_each_format_means_its_absence(
    target: HeadTarget, tmp_path: Path
) -> None:
    config, tensors = checkpoints.eagle3(SIZES)
    del config["norm_before_residual"]
    for name, values, expected in (
        ("speculators", config, True),
        ("flat", checkpoints.specforge(SIZES)[0], False),
    ):
        head: Any = make_head(Eagle3Options(model=str(save(tmp_path / name, values, tensors))), target)
        assert head.model.layers[0].norm_before_residual is expected


def test_a_head_without_embedding_and_output_takes_the_targets(target: HeadTarget, tmp_path: Path) -> None:
    config, tensors = checkpoints.eagle(SIZES)
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    head: Any = make_head(EagleOptions(model=str(save(tmp_path / "a", config, tensors))), target)
    assert torch.equal(head.model.embed_tokens.weight, target.embedding(16))
    narrow = Sizes(vocab=40, target=16, width=24, inner=24, dim=8)
    config, tensors = checkpoints.eagle3(narrow)
    del tensors["embed_tokens.weight"]
    with pytest.raises(HeadRefused, match="embedding has a width of 16, the head needs 24"):
        make_head(Eagle3Options(model=str(save(tmp_path / "b", config, tensors))), target)
