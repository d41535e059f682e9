"""Modules for multi-token prediction that checkpoints of real families carry."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config.drafter_options import MtpOptions
from specdec.drafting.heads.checkpoint import HeadRefused
from specdec.drafting.heads.methods.mtp import load_mtp
from specdec.drafting.heads.methods.registry import make_head
from specdec.drafting.heads.parts import Attend
from specdec.engine.attention.kv_cache import LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from tests.support.engine.local_pair import LocalPair, open_session
from tests.support.engine.tiny_models import VOCAB_SIZE
from tests.support.heads.modules import FAMILIES, Reference, train
from tests.support.heads.targets import target_of

TOKENS = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(23)]


def dense(geometry: LayerGeometry, options: AttentionOptions) -> Attend:
    """Attention of a text's rows among themselves."""

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // geometry.num_kv_heads
        keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * options.scaling
        visible = torch.ones(scores.shape[1:]).tril().bool()
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), values)

    return attend


@pytest.mark.parametrize("name", list(FAMILIES))
@torch.inference_mode()
def test_a_module_of_the_targets_own_files_computes_its_familys_formulas(name: str, tmp_path: Path) -> None:
    reference = Reference(FAMILIES[name]).eval()
    target = target_of(reference.save(tmp_path))
    model, geometries, options = load_mtp("", target)
    tokens = torch.tensor(TOKENS)
    states = reference.states(tokens[None])[0, :-1]
    expected = reference.logits(states[None], tokens[None, 1:])[0]
    attend = dense(geometries[0], options)
    hidden = model.run(model.fuse(states[:, None]), tokens[1:], torch.arange(len(states)), attend)
    torch.testing.assert_close(model.logits(hidden), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_trained_module_is_often_right_and_changes_no_token(name: str, tmp_path: Path) -> None:
    reference = Reference(FAMILIES[name], seed=3)
    cycles = [[(start + 5 * i) % 60 + 10 for i in range(24)] for start in range(0, 60, 4)]
    train(reference, cycles, num_steps=50)
    folder = str(reference.save(tmp_path))
    pair = LocalPair(folder, folder, {"max_model_len": 128}, max_model_len=128, max_draft_tokens=12)
    opens = {
        f"{number} at {temperature}": open_session(
            cycles[number][:9], max_tokens=40, temperature=temperature, ignore_eos=True, seed=number
        )
        for temperature, number in itertools.product((0.0, 0.7), range(3))
    }
    plain = {key: outcome.token_ids for key, outcome in pair.run(opens, use_draft=False).items()}
    pair.reset(drafters=[MtpOptions()])
    outcomes = pair.run(opens, use_draft=False)
    assert {key: outcome.token_ids for key, outcome in outcomes.items()} == plain
    assert all(len(tokens) == 40 for tokens in plain.values())
    assert sum(outcome.num_accepted for key, outcome in outcomes.items() if key.endswith(" 0.0")) > 40


def spoilt(folder: Path, change: str) -> Path:
    """A checkpoint without its module, or with a part of it that is missing, of another shape or not finite."""
    path = Reference(FAMILIES["mimo"]).save(folder) / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if "mtp_layers" in name]
    projection = "model.mtp_layers.0.input_proj.weight"
    match change:
        case "no module":
            tensors = {name: value for name, value in tensors.items() if name not in names}
        case "no norm":
            del tensors["model.mtp_layers.0.token_layernorm.weight"]
        case "no layer":
            del tensors["model.mtp_layers.0.mlp.up_proj.weight"]
        case "a wrong shape":
            tensors[projection] = tensors[projection][:, :7].contiguous()
        case "no number":
            tensors[projection][0, 0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no module", "have no module for multi-token prediction"),
        ("no norm", "token_layernorm.weight"),
        ("no layer", "missing keys of its module: model.layers.0.mlp.up_proj.weight"),
        ("a wrong shape", "input_proj.weight"),
        ("no number", "input_proj.weight"),
    ],
)
def test_a_checkpoint_without_a_whole_module_is_refused_by_name(change: str, message: str, tmp_path: Path) -> None:
    target = target_of(spoilt(tmp_path, change))
    with pytest.raises(HeadRefused, match=f"mtp: .*{message}"):
        make_head(MtpOptions(), target)
