"""Runs an unmodified transformers model over ragged batches through the paged attention function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from specdec.engine.attention.declared_masks import declared_masks
from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.attention.latent import cache_latents
from specdec.engine.attention.paged import (
    ATTENTION_NAME,
    CONTEXT_KWARG,
    AttentionError,
    AttentionKernel,
    ContextDropped,
    ForwardContext,
    RecordingKernel,
    register_paged_attention,
)
from specdec.engine.batch import Batch
from specdec.engine.errors import ModelLoadError
from specdec.engine.model.mixtures.functions import make_functions_row_invariant
from specdec.engine.model.model_check import check_attention_calls, refusing, switch_attention
from specdec.engine.model.proofs.probe import SelfTest
from specdec.engine.model.skipping import decoder_layers, has_attention, leaving_out
from specdec.engine.model.tapping import find_decoder, tapping
from specdec.engine.recurrent.layers import RecurrentLayers
from specdec.engine.states.memory import CellShape
from specdec.engine.states.plan import fresh_plan
from specdec.engine.sublayers import SkippedSublayers

_SORTING = "transformers.integrations."
"""Modules that number rows only to sort them back: kernels of experts."""


class NumberedRows(TorchFunctionMode):
    """Finds modules that take row numbers for positions, which is wrong in a batch of several sequences.

    It records calls of ``torch.arange`` with as many numbers as a pass has rows.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        self.places: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See torch."""
        result = func(*args, **(kwargs or {}))
        if func is torch.arange and result.numel() == self._num_rows:
            frame = sys._getframe(1)
            name = str(frame.f_globals.get("__name__"))
            if not name.startswith((_SORTING, "specdec.")):
                self.places.add(f"{name.rpartition('.')[2]}:{frame.f_lineno}")
        return result


class StepModel(Protocol):
    """A model that computes a step: a transformers model or a fused decoder."""

    def __call__(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Write the batch's keys and values; returns float32 logits ``[R, V]`` of ``logits_indices``."""


class RaggedModel:
    """A model whose attention calls ``kernel``, and whose recurrent layers use the cache's states. The constructor
    switches both permanently.

    Raises ``ModelNotSupported`` if the model does not use the registered function.
    """

    def __init__(
        self, model: PreTrainedModel, kernel: AttentionKernel, mask_windows: Sequence[int | None] = ()
    ) -> None:
        """`mask_windows`: see ``ForwardContext``; empty until ``record_attention`` finds them."""
        register_paged_attention()
        self.recurrent = RecurrentLayers.of(model)
        if self.recurrent:
            make_functions_row_invariant(model)  # recurrent layers call some of them on few numbers per token
        switch_attention(model, ATTENTION_NAME)
        if model.device.type == "cpu":  # the GPU's kernels take no keys of this width
            cache_latents(model)
        self.model = model
        self.kernel = kernel
        self.mask_windows = tuple(mask_windows)
        self._gives = False  # whether hooks give the context to attention modules, as layers drop keywords

    def __call__(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """See ``StepModel``."""
        return self._run(ForwardContext(batch, cache, self.kernel, mask_windows=self.mask_windows))

    def at_positions(self, batch: Batch, cache: KVCache, position_ids: torch.Tensor) -> torch.Tensor:
        """As ``__call__``, but the model's modules get ``position_ids`` [T]; attention reads as the batch says."""
        return self._run(ForwardContext(batch, cache, self.kernel, mask_windows=self.mask_windows), position_ids)

    def without(self, skipped: SkippedSublayers) -> StepModel:
        """A pass of the same modules that skips sublayers; the others' keys and values go to the same places. Not
        during another pass.

        Raises ModelLoadError unless each layer has an attention, called once, and an MLP.
        """
        layers = decoder_layers(self.model)
        if self.recurrent:
            raise ModelLoadError("layer_skip: the model has recurrent layers; use a draft or n-grams")
        if sum(map(has_attention, layers)) < len(layers):
            raise ModelLoadError("layer_skip: the model lacks sublayers already")
        attending = [number for number in range(len(layers)) if number not in skipped.attention]

        def run(batch: Batch, cache: KVCache) -> torch.Tensor:
            if cache.num_layers != len(layers):
                raise ModelLoadError("layer_skip: the model's layers do not attend once each")
            with leaving_out(self.model, skipped):
                return self._run(ForwardContext(batch, cache, self.kernel, attending, self.mask_windows))

        return run

    def record_attention(self, probe: SelfTest) -> RecordingKernel:
        """Run two shapes without computing attention. Returns the geometries and options of a pass's attention calls.

        Raises ``ModelNotSupported`` if the calls depend on the shape or miss a layer, or if modules number rows.
        """
        recorders = (RecordingKernel(), RecordingKernel())
        cells: list[list[CellShape]] = []
        places: list[set[str]] = []
        masks = declared_masks(ATTENTION_NAME, probe.num_positions)
        with refusing(self.model.config.model_type), masks:
            for recorder, num_rows in zip(recorders, (2, 7), strict=True):
                context = ForwardContext(probe.batch(probe.prefix_rows(num_rows)), None, recorder)
                with NumberedRows(num_rows) as numbered:
                    self._run(context)
                places.append(numbered.places)
                cells.append(self.recurrent.shapes)
            if found := sorted(set.intersection(*places)):
                raise AttentionError(f"it numbers a batch's rows instead of using their positions ({found[0]})")
        check_attention_calls(self.model, [recorder.geometries for recorder in recorders], cells)
        self.mask_windows = tuple(options.sliding_window for options in recorders[0].options)
        return recorders[0]

    @contextmanager
    def _states(self, context: ForwardContext) -> Iterator[None]:
        if not self.recurrent:
            yield
            return
        plan = context.batch.states or fresh_plan(context.batch.row_seq.tolist())
        memory = None if context.cache is None else context.cache.states
        with self.recurrent.running(plan, memory):
            yield

    def _run(self, context: ForwardContext, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        batch = context.batch
        num_logits = batch.logits_indices.shape[0]
        kept = batch.logits_indices if num_logits else batch.logits_indices.new_zeros(1)
        kwargs: dict[str, Any] = {CONTEXT_KWARG: context}
        given = giving(self.model, context) if self._gives else nullcontext()
        try:
            with tapping(self.model, batch.tap), self._states(context), given:
                output = self.model(
                    input_ids=batch.input_ids.unsqueeze(0),
                    position_ids=(batch.position_ids if position_ids is None else position_ids).unsqueeze(0),
                    use_cache=False,
                    logits_to_keep=kept,  # a tensor, as models disagree on the meaning of 0 and slices
                    **kwargs,
                )
        except ContextDropped:
            if self._gives:
                raise
            self._gives = True
            return self._run(context, position_ids)
        logits: torch.Tensor = output.logits[0]
        if logits.shape[0] != kept.shape[0]:  # some classes ignore logits_to_keep
            logits = logits[kept]
        return logits[:num_logits].float()


@contextmanager
def giving(model: PreTrainedModel, context: ForwardContext) -> Iterator[None]:
    """Give a pass's context to the attention modules by hooks. Cost: some microseconds per layer."""

    def give(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, CONTEXT_KWARG: context}

    found = find_decoder(model)
    attentions = [getattr(layer, "self_attn", None) for layer in (() if found is None else found[1])]
    handles = [
        attention.register_forward_pre_hook(give, with_kwargs=True)
        for attention in attentions
        if isinstance(attention, torch.nn.Module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
