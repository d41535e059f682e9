"""What heads compute: what the package `speculators` does on checkpoints it made, and for others the papers' formulas.

The checkpoints and what the package computes are in `tests/fixtures/heads`, whose `make.py` says how they were made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from specdec.config.drafter_options import MedusaOptions
from specdec.drafting.heads.checkpoint import HeadFiles, read_head_files
from specdec.drafting.heads.config import read_config
from specdec.drafting.heads.methods.dflash import load_dflash
from specdec.drafting.heads.methods.dspark import PREFIXES, load_spark
from specdec.drafting.heads.methods.eagle import load_eagle
from specdec.drafting.heads.methods.eagle3 import Eagle3Model, load_eagle3
from specdec.drafting.heads.methods.medusa import load_medusa
from specdec.drafting.heads.methods.peagle import load_peagle
from specdec.drafting.heads.parts import Attend, dense_attention
from specdec.drafting.heads.target import HeadTarget
from tests.support.heads import checkpoints
from tests.support.heads.checkpoints import Sizes
from tests.support.heads.targets import FIXTURES, fixture_target

MOST_ERROR = 1e-5
SIZES = Sizes(vocab=40, target=16, width=16, inner=24, dim=8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> HeadTarget:
    return fixture_target(tmp_path_factory.mktemp("target"))


def fixture(name: str) -> tuple[HeadFiles, dict[str, torch.Tensor]]:
    """A head's files, and what it is to compute."""
    return read_head_files(FIXTURES / name), load_file(FIXTURES / "expected" / f"{name}.safetensors")


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) < MOST_ERROR * max(1.0, float(expected.abs().max()))


def own_and_before(rows: list[tuple[int, int]]) -> torch.Tensor:
    """What rows (place, step) read of each other in EAGLE-3: the text up to their place, and their own rollout."""
    return torch.tensor([[(b[1] == 0 and b[0] <= a[0]) or (b[0] == a[0] and b[1] <= a[1]) for b in rows] for a in rows])


@pytest.mark.parametrize("name", ["eagle3", "eagle3-before-residual", "eagle3.1", "eagle3-qwen-two-layers"])
@torch.inference_mode()
def test_eagle3_computes_what_speculators_does_for_the_text_and_for_what_follows(name: str, target: HeadTarget) -> None:
    files, expected = fixture(name)
    config = read_config(files.config)
    assert config.taps(None, 4) == (1, 2, 3)
    model, vocabulary = load_eagle3(files, config, (1, 2, 3), target)
    assert vocabulary.target_ids is not None
    ids, taps = expected["input_ids"][0], expected["hidden_states"][0].unflatten(1, (3, -1))
    length = len(ids)
    rows: list[tuple[int, int]] = []
    states, hidden = [], model.fuse(taps)
    for step in range(3):
        # The package's positions are those of the text; a step goes on from the state of the one before at its place.
        states.append(hidden[: length - step])
        rows += [(place, step) for place in range(length - step)]
        tokens = torch.cat([ids[s:] for s in range(step + 1)])
        positions = torch.tensor([place + s for place, s in rows])
        computed = model.run(torch.cat(states), tokens, positions, dense_attention(own_and_before(rows)))
        own = computed[-(length - step) :]
        assert_close(model.logits(own), expected["logits"][step, : length - step])
        hidden = model.carry(own)


@torch.inference_mode()
def test_peagle_computes_what_speculators_does_for_all_rollouts(target: HeadTarget) -> None:
    files, expected = fixture("peagle")
    config = read_config(files.config)
    model, _, mask_hidden, token = load_peagle(files, config, (1, 2, 3), target)
    anchors, depths = expected["anchors"].tolist(), expected["depths"].tolist()
    taps = expected["hidden_states"][0].unflatten(1, (3, -1))
    fused, masked = model.fuse(taps), model.fuse(mask_hidden[None])[0]
    rows = list(zip(anchors, depths, strict=True))
    states = torch.stack([fused[place] if depth == 0 else masked for place, depth in rows])
    tokens = torch.tensor([int(expected["input_ids"][0, place]) if depth == 0 else token for place, depth in rows])
    positions = expected["anchors"] + expected["depths"]
    hidden = model.run(states, tokens, positions, dense_attention(own_and_before(rows)))
    assert_close(model.logits(hidden), expected["logits"])


def over_context(
    entries: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
) -> Attend:
    """Attention of a block over a context, and over itself in both directions."""

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = entries(layer)
        num_rows, num_context = len(query), len(keys)
        visible = torch.zeros(num_context + num_rows, num_context + num_rows, dtype=torch.bool)
        visible[num_context:] = True
        visible[:num_context] = torch.eye(num_context, num_context + num_rows, dtype=torch.bool)
        padded = torch.cat([query.new_zeros(num_context, *query.shape[1:]), query])
        every = dense_attention(visible)(layer, padded, torch.cat([keys, key]), torch.cat([values, value]))
        return every[num_context:]

    return attend


def blocks(name: str, target: HeadTarget) -> tuple[HeadFiles, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """A head's files, what is expected, and of blocks the normed hidden states and logits [anchors, block, ...]."""
    files, expected = fixture(name)
    config = read_config(files.config)
    assert config.layer_ids == (1, 3)
    plain = {key: value for key, value in files.tensors.items() if not key.startswith(PREFIXES)}
    model, _, mask = load_dflash(HeadFiles(files.directory, files.config, plain), config, (1, 3), target)
    ids, taps = expected["input_ids"][0], expected["hidden_states"][0].unflatten(1, (2, -1))
    hidden = []
    for anchor in expected["anchors"].tolist():
        context = model.context(taps[:anchor])
        embedded = mask.expand(config.block_size, -1).clone()
        embedded[0] = model.embed_tokens(ids[anchor])
        attend = over_context(lambda layer, c=context: model.entries(layer, c, torch.arange(len(c))))  # type: ignore[misc]
        hidden.append(model.run(embedded, torch.arange(anchor, anchor + config.block_size), attend))
    states = torch.stack(hidden)
    return files, expected, states, model.lm_head(states)


@torch.inference_mode()
def test_dflash_computes_what_speculators_does_for_blocks(target: HeadTarget) -> None:
    _, expected, _, logits = blocks("dflash", target)
    assert_close(logits, expected["logits"])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.inference_mode()
def test_dspark_computes_what_speculators_does_of_the_tokens_before(kind: str, target: HeadTarget) -> None:
    files, expected, hidden, logits = blocks(f"dspark-{kind}", target)
    spark = load_spark(files, read_config(files.config), logits.shape[-1], target)
    anchors = expected["anchors"]
    state = hidden.new_zeros(len(anchors), spark.rank)
    for slot in range(logits.shape[1]):
        before = expected["input_ids"][0, anchors + slot]
        added, confidence, state = spark.bias(before, hidden[:, slot], state)
        assert confidence is not None
        assert_close(logits[:, slot] + added, expected["logits"][:, slot])
        assert_close(confidence, torch.sigmoid(expected["confidence"][:, slot]))


@torch.inference_mode()
def test_eagle_computes_the_papers_formula(target: HeadTarget, tmp_path: Path) -> None:
    values, t = checkpoints.eagle(SIZES)
    files = read_head_files(checkpoints.save(tmp_path, values, t))
    model, _ = load_eagle(files, read_config(files.config), target)
    generator = torch.Generator().manual_seed(4)
    states, ids = torch.randn(6, 16, generator=generator), torch.randint(0, 40, (6,), generator=generator)
    hidden = model.run(
        model.fuse(states[:, None]), ids, torch.arange(6), dense_attention(torch.ones(6, 6).tril().bool())
    )

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return t[name] * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(6)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
        low, high = x.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    x = torch.cat([t["embed_tokens.weight"][ids], states], 1) @ t["fc.weight"].T + t["fc.bias"]
    p = "layers.0.self_attn."
    q, k, v = ((x @ t[f"{p}{n}_proj.weight"].T).unflatten(1, (-1, 8)) for n in "qkv")
    q, k = rotated(q), rotated(k).repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 8**-0.5
    weights = scores.masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1)).flatten(1)
    x = x + attended @ t[f"{p}o_proj.weight"].T
    normed = rms(x, "layers.0.post_attention_layernorm.weight")
    inner = functional.silu(normed @ t["layers.0.mlp.gate_proj.weight"].T) * (
        normed @ t["layers.0.mlp.up_proj.weight"].T
    )
    x = x + inner @ t["layers.0.mlp.down_proj.weight"].T
    assert_close(hidden, x)
    assert_close(model.logits(hidden), x @ t["lm_head.weight"].T)


@pytest.mark.parametrize("name", ["", "medusa_lm_head.pt"])
@pytest.mark.parametrize("num_layers", [1, 2])
@torch.inference_mode()
def test_medusa_computes_the_papers_formula_in_both_kinds_of_files(
    name: str, num_layers: int, target: HeadTarget, tmp_path: Path
) -> None:
    values, t = checkpoints.medusa(SIZES, num_layers=num_layers)
    files = read_head_files(checkpoints.save(tmp_path, values, t, name))
    head = load_medusa(files, MedusaOptions(model=str(tmp_path)), target)
    assert len(head.model) == 3  # whatever its config says
    states = torch.randn(5, 16, generator=torch.Generator().manual_seed(4))
    for index in range(3):
        z = states
        for layer in range(num_layers):
            z = z + functional.silu(z @ t[f"{index}.{layer}.linear.weight"].T + t[f"{index}.{layer}.linear.bias"])
        assert_close(head.model.logits(states)[:, index], z @ t[f"{index}.{num_layers}.weight"].T)


@torch.inference_mode()
def test_old_names_and_ids_of_specforge_are_those_of_speculators(target: HeadTarget, tmp_path: Path) -> None:
    models: list[Eagle3Model] = []
    for name, (values, tensors) in {"a": checkpoints.eagle3(SIZES), "b": checkpoints.specforge(SIZES)}.items():
        files = read_head_files(checkpoints.save(tmp_path / name, values, tensors))
        config = read_config(files.config)
        assert config.method == "eagle3"
        assert config.taps(None, 4) == (1, 2, 3)
        models.append(load_eagle3(files, config, (1, 2, 3), target)[0])
    states, ids = torch.randn(4, 3, 16), torch.arange(4)
    one, other = (
        model.logits(model.run(model.fuse(states), ids, ids, dense_attention(torch.ones(4, 4).tril().bool())))
        for model in models
    )
    assert torch.equal(one, other)
