"""What goes wrong only at positions past the self-test's sequences, where no switch of a config is moved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralRotaryEmbedding

from specdec.engine.errors import ModelNotSupported
from specdec.engine.model import fused
from specdec.engine.model.runner import ModelRunner
from specdec.engine.native.kernels import NativeAttention
from specdec.engine.settings import EngineSettings
from tests.support.engine.tiny_models import save_random

FAR = 100
"""A position past which something changes: the self-test has 37."""


def save(directory: Path, window: int | None) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MistralConfig(
        vocab_size=131,
        num_hidden_layers=2,
        sliding_window=window,
        max_position_embeddings=400,
        initializer_range=0.2,
        **sizes,
    )
    return save_random(config, directory)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model with a window of ``FAR`` positions."""
    return save(tmp_path, FAR)


def load(directory: Path, **settings: Any) -> ModelRunner:
    defaults: dict[str, Any] = {"model": str(directory), "num_blocks": 16, "device": "cpu"}
    return ModelRunner.load(EngineSettings.model_validate({**defaults, **settings}))


def test_a_mask_that_is_chunked_by_a_number_that_no_config_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = mistral.create_causal_mask

    def chunked(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs, and_mask_function=lambda batch, head, q, kv: q // 70 == kv // 70)

    monkeypatch.setattr(mistral, "create_causal_mask", chunked)
    with pytest.raises(ModelNotSupported, match="no sliding window"):
        load(save(tmp_path, window=None))


def test_rows_that_are_numbered_in_place_of_positions_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = MistralAttention.forward

    def scaled(self: MistralAttention, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scale = 1 + torch.log1p(torch.arange(hidden_states.shape[1]) // FAR)
        return plain(self, hidden_states * scale[None, :, None], *args, **kwargs)

    monkeypatch.setattr(MistralAttention, "forward", scaled)
    with pytest.raises(ModelNotSupported, match="numbers a batch's rows"):
        load(directory)


def test_frequencies_that_change_with_the_longest_sequence_of_a_batch_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = MistralRotaryEmbedding.forward

    def stretched(self: MistralRotaryEmbedding, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return plain(self, hidden, position_ids / 2 if int(position_ids.max()) > FAR else position_ids)

    monkeypatch.setattr(MistralRotaryEmbedding, "forward", stretched)
    with pytest.raises(ModelNotSupported, match=f"rest of the batch.* set max_model_len to {FAR} or less"):
        load(directory)
    assert load(directory, max_model_len=FAR).max_model_len == FAR


def test_a_fused_decoder_without_its_far_window_is_not_used(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, native: None
) -> None:
    view = fused._attention_view
    monkeypatch.setattr(
        fused,
        "_attention_view",
        lambda num_heads, geometry, options: view(num_heads, geometry, replace(options, sliding_window=None)),
    )
    assert "/native-" in load(directory).numerics_id
    assert "failed its self-test" in caplog.text


def test_a_kernel_without_its_far_window_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, native: None
) -> None:
    plain = NativeAttention.__call__

    def forgetting(self: NativeAttention, *args: Any) -> torch.Tensor:
        return plain(self, *args[:-1], replace(args[-1], sliding_window=None))

    monkeypatch.setattr(NativeAttention, "__call__", forgetting)
    with pytest.raises(ModelNotSupported, match="paged logits differ"):
        load(directory, fused="off")


@pytest.mark.parametrize("what", ["the end of a split in a chunk", "a tree far away"])
def test_kernels_that_are_wrong_only_for_long_chunks_or_far_trees_are_not_used(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = NativeAttention.__call__

    def wrong(self: NativeAttention, query: Any, key: Any, value: Any, layer: int, context: Any, options: Any) -> Any:
        batch = context.batch
        result = plain(self, query, key, value, layer, context, options)
        has_path = batch.path_offsets[1:] > batch.path_offsets[:-1]
        is_far = batch.position_ids >= 300
        in_chunk = torch.bincount(batch.row_seq)[batch.row_seq] > 1
        rows = is_far & (has_path if what == "a tree far away" else in_chunk & ~has_path)
        return torch.where(rows[:, None, None], result.flip(2), result)

    monkeypatch.setattr(NativeAttention, "__call__", wrong)
    with pytest.raises(ModelNotSupported, match="paged logits differ"):
        load(save(tmp_path, window=None), fused="off")
