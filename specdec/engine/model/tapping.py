"""Taps transformers' modules by hooks for one pass, and checks that a model can be tapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.errors import TapRefused
from specdec.engine.tap import FINAL, HiddenTap, TapCollector


def find_decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList] | None:
    """The module that runs a model's layers (its output is after the final norm), and the layers; None if not found.

    The layers are the first list with as many modules as the config has layers.
    """
    count = int(getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0))
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) == count > 0:
                return parent, child
    return None


@contextmanager
def tapping(model: PreTrainedModel, tap: HiddenTap | None) -> Iterator[None]:
    """Fill a tap in the pass inside the context. Cost: some microseconds and a copy per tapped layer.

    Raises KeyError if the model hides a layer's states; ``ModelRunner.check_tap`` checks that first.
    """
    if tap is None:
        yield
        return
    collector = TapCollector(tap)
    decoder, layers = find_decoder(model) or (model, nn.ModuleList())

    def before(layer_id: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            collector.see(layer_id, args[0][0] if args else kwargs["hidden_states"][0])

        return hook

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        states: torch.Tensor = output[0] if isinstance(output, tuple) else output
        collector.see(len(layers), states[0])

    def final(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        collector.see(FINAL, output[0][0])

    handles = []
    try:
        for layer_id in tap.layer_ids:
            if layer_id == FINAL:
                handles.append(decoder.register_forward_hook(final))
            elif layer_id == len(layers):
                handles.append(layers[-1].register_forward_hook(after))
            elif layer_id < len(layers):
                handles.append(layers[layer_id].register_forward_pre_hook(before(layer_id), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
    collector.done()


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> None:
    """Check ids of layers. Raises ``TapRefused`` for unknown or repeated ones."""
    if len(set(layer_ids)) < len(layer_ids):
        raise TapRefused(f"layer_ids {list(layer_ids)}: one is named twice")
    for layer_id in layer_ids:
        if not (layer_id == FINAL or 0 <= layer_id <= num_layers):
            raise TapRefused(f"layer_ids: {layer_id} is not between 0 and the model's {num_layers} layers")


def check_pass(run: Callable[[], torch.Tensor], tap: HiddenTap, shape: tuple[int, ...]) -> None:
    """Run a pass with a tap and check that it is filled with `shape`. Raises ``TapRefused``."""
    try:
        run()
    except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
        raise TapRefused(
            f"the model's layers do not provide their hidden states {list(tap.layer_ids)}: {error!r}"
        ) from error
    if tap.states is None:
        raise TapRefused("the model's decoder has no tap")
    if tuple(tap.states.shape) != shape:
        raise TapRefused(f"the model's layers provide hidden states of shape {tuple(tap.states.shape)}, not {shape}")
