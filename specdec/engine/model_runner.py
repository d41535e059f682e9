"""Runs forward passes of one model over the paged KV cache. Knows nothing of sessions, drafts or targets."""

import logging
import platform
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.attention import (
    ATTENTION_NAME,
    CONTEXT_KWARG,
    AttentionError,
    AttentionKernel,
    ForwardContext,
    GatherAttention,
    RecordingKernel,
    TiledAttention,
    register_paged_attention,
)
from specdec.engine.batch import Batch
from specdec.engine.kv_cache import KVCache, LayerGeometry
from specdec.engine.linear import OneDnnWeight, WeightPacker, make_modules_row_invariant
from specdec.engine.model_gate import ModelLoadError, ModelNotSupported, check_attention_calls, switch_attention
from specdec.engine.model_loader import LoadedModel, load_model
from specdec.engine.native.build import NativeUnavailable
from specdec.engine.native.kernels import KERNEL_VERSION, NativeAttention, NativeKernels
from specdec.engine.self_test import Probe, ProbeLog, tolerance
from specdec.engine.settings import EngineSettings

_CPU_KV_BYTES = 1 << 30
_CUDA_FREE_SHARE = 0.9
_WARMUP_ROWS = (1, 2, 8, 32)
_logger = logging.getLogger(__name__)


class ModelRunner:
    """A model, its KV cache and the kernels that run it. Make it with ``load``.

    Not thread-safe: one thread at a time may call it, and always the same one.
    """

    def __init__(self, loaded: LoadedModel, settings: EngineSettings) -> None:
        self.settings = settings
        self.device = loaded.device
        self.dtype = loaded.dtype
        self.identity = loaded.identity
        self.tokenizer_json = loaded.tokenizer.tokenizer_json
        self.tokenizer_config = loaded.tokenizer.config
        self.eos_token_ids = loaded.eos_token_ids
        self.max_model_len = loaded.max_model_len
        self.block_size = settings.block_size
        self.num_logits = int(loaded.model.get_output_embeddings().weight.shape[0])
        self.vocab_size = min(self.num_logits, loaded.tokenizer.vocab_size or self.num_logits)
        self.row_invariant = False
        self.num_parameters = int(loaded.model.num_parameters())
        self._model = loaded.model
        self._kernel: AttentionKernel = GatherAttention() if self.device.type == "cuda" else TiledAttention()
        self._kernel_path = "torch"
        self._cache: KVCache | None = None

    @classmethod
    def load(cls, settings: EngineSettings) -> "ModelRunner":
        """Load a model, prove that it can be paged, and allocate its KV cache.

        Raises ``ModelNotSupported`` where the gate refuses the model, ``ModelLoadError`` where files, memory or a
        demanded guarantee are missing. Sets ATen's threads for the whole process: 1 on CPU float32, whose kernels
        bring their own.
        """
        loaded = load_model(settings)
        runner = cls(loaded, settings)
        runner._prepare(settings)
        return runner

    @property
    def num_blocks(self) -> int:
        """KV blocks of the cache."""
        return self.cache.num_blocks

    @property
    def cache(self) -> KVCache:
        """The KV cache."""
        if self._cache is None:
            raise ModelLoadError("the model is not loaded to its end")
        return self._cache

    @property
    def numerics_id(self) -> str:
        """What a row's bits depend on besides the model: equal ids give equal logits where ``row_invariant`` holds."""
        parts = [str(self.dtype).removeprefix("torch."), self.device.type, self._kernel_path]
        if self.device.type == "cuda":
            parts.append(torch.cuda.get_device_name(self.device).replace(" ", "-"))
        else:
            parts.append(f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}")
        return "/".join([*parts, f"torch-{torch.__version__}", "tp1"])

    def forward(self, batch: Batch) -> torch.Tensor:
        """One pass over a ragged batch of T rows; returns logits ``[R, V]`` float32 of the rows in ``logits_indices``.

        Every row's key and value are written to its slot before any row reads. Cost: one model forward over T rows.
        """
        return self._run(batch, self.cache, self._kernel)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks ``(source, destination)`` in all layers."""
        self.cache.copy_blocks(pairs)

    def copy_slots(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy physical KV slots ``src[i] -> dst[i]`` in all layers; all are read before any is written."""
        self.cache.copy_slots(src, dst)

    @torch.inference_mode()
    def _run(self, batch: Batch, cache: KVCache | None, kernel: AttentionKernel) -> torch.Tensor:
        context = ForwardContext(batch, cache, kernel)
        return self._run_model(context)

    def _run_model(self, context: ForwardContext) -> torch.Tensor:
        batch = context.batch
        num_rows = batch.logits_indices.shape[0]
        kept = batch.logits_indices if num_rows else batch.logits_indices.new_zeros(1)
        kwargs: dict[str, Any] = {CONTEXT_KWARG: context}
        output = self._model(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            use_cache=False,
            logits_to_keep=kept,
            **kwargs,
        )
        logits: torch.Tensor = output.logits[0, :num_rows].float()
        return logits

    @torch.inference_mode()
    def _run_dense(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits ``[T, V]`` of one sequence by the model's own attention, without any of the engine's parts."""
        logits: torch.Tensor = self._model(input_ids=token_ids[None].to(self.device), use_cache=False).logits
        return logits[0].float()

    def _prepare(self, settings: EngineSettings) -> None:
        is_exact = self.device.type == "cpu" and self.dtype == torch.float32
        if settings.deterministic and not is_exact:
            raise ModelLoadError("deterministic needs float32 on CPU: no row-invariant kernels exist for anything else")
        if self.device.type == "cpu":
            torch.set_num_threads(1 if is_exact else settings.num_threads)
        probe = Probe(self.vocab_size, self.max_model_len, self.block_size, self.device)
        expected = self._dense_logits(probe) if settings.self_test else {}
        register_paged_attention()
        switch_attention(self._model, ATTENTION_NAME)
        if is_exact and settings.deterministic is not False:
            make_modules_row_invariant(self._model, self._choose_kernels(settings))
        geometries = self._record_geometries(probe)
        if settings.self_test:
            self._self_test(probe, geometries, expected)
        self._cache = self._allocate(settings, geometries)

    def _choose_kernels(self, settings: EngineSettings) -> WeightPacker:
        """Take the native kernels where they can be had, else oneDNN and torch; returns the packer of linear layers."""
        if settings.native != "off":
            try:
                kernels = NativeKernels(settings.num_threads)
            except NativeUnavailable as error:
                if settings.native == "on":
                    raise ModelLoadError(f"native kernels were asked for: {error}") from error
                _logger.warning("no native kernels, the slower torch path is used", extra={"reason": str(error)})
            else:
                self._kernel = NativeAttention(kernels)
                self._kernel_path = f"native-{KERNEL_VERSION}-lanes{kernels.lanes}"
                return kernels.pack
        self._kernel_path = "onednn"
        return partial(OneDnnWeight, num_threads=settings.num_threads)

    def _dense_logits(self, probe: Probe) -> dict[tuple[int, ...], torch.Tensor]:
        return {tuple(tokens): self._run_dense(torch.tensor(tokens)) for tokens in probe.sequences}

    def _record_geometries(self, probe: Probe) -> list[LayerGeometry]:
        """Run shapes through the model without attending, to count the attention calls and size the cache."""
        recorders = [RecordingKernel() for _ in range(2)]
        try:
            for recorder, rows in zip(recorders, (probe.prefix_rows(2), probe.prefix_rows(7)), strict=True):
                self._run(probe.batch(rows), None, recorder)
        except AttentionError as error:
            raise ModelNotSupported(self._model.config.model_type, str(error)) from error
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ModelNotSupported(self._model.config.model_type, f"its ragged forward pass fails: {error}") from error
        check_attention_calls(self._model, [len(recorder.geometries) for recorder in recorders])
        if recorders[0].geometries != recorders[1].geometries:
            raise ModelNotSupported(self._model.config.model_type, "its KV sizes vary with the input")
        return recorders[0].geometries

    def _self_test(
        self, probe: Probe, geometries: list[LayerGeometry], expected: dict[tuple[int, ...], torch.Tensor]
    ) -> None:
        cache = KVCache(geometries, probe.num_blocks, self.block_size, self.dtype, self.device)
        try:
            log = probe.run(partial(self._run, kernel=self._kernel), cache)
        except (AttentionError, TypeError, ValueError, RuntimeError) as error:
            raise ModelNotSupported(self._model.config.model_type, f"its paged forward pass fails: {error}") from error
        self._judge(probe, log, expected)

    def _judge(self, probe: Probe, log: ProbeLog, expected: dict[tuple[int, ...], torch.Tensor]) -> None:
        error = log.error(lambda tokens: expected[tuple(tokens.tolist())], probe.sequences)
        if not error <= tolerance(self.dtype):
            raise ModelNotSupported(
                self._model.config.model_type,
                f"paged logits differ from dense ones by {error:.2g} of their spread: something besides "
                "keys and values decides its attention",
            )
        self.row_invariant = log.row_invariant
        if self.settings.deterministic and not self.row_invariant:
            raise ModelLoadError(f"{self.identity.name} is not row-invariant: rows differ with their company")

    def _allocate(self, settings: EngineSettings, geometries: list[LayerGeometry]) -> KVCache:
        num_blocks = settings.num_blocks or self._num_blocks_for_budget(settings, geometries)
        return KVCache(geometries, num_blocks, self.block_size, self.dtype, self.device)

    def _num_blocks_for_budget(self, settings: EngineSettings, geometries: list[LayerGeometry]) -> int:
        block_bytes = sum(g.num_elements for g in geometries) * self.block_size * self.dtype.itemsize
        budget = settings.kv_cache_memory_bytes
        if budget is None:
            budget = _CPU_KV_BYTES
            if self.device.type == "cuda":
                budget = int(torch.cuda.mem_get_info(self.device)[0] * _CUDA_FREE_SHARE)
        most_useful = settings.max_batch_seqs * (-(-self.max_model_len // self.block_size) + 4)
        num_blocks = min(budget // block_bytes, most_useful)
        if num_blocks < 2:
            raise ModelLoadError(f"a KV budget of {budget} bytes does not hold two blocks of {block_bytes} bytes")
        return int(num_blocks)

    def warmup(self) -> None:
        """Run a few shapes through a small cache of its own, so that the first real step pays for no initialisation."""
        probe = Probe(self.vocab_size, self.max_model_len, self.block_size, self.device)
        cache = KVCache(self.cache.geometries, probe.num_blocks, self.block_size, self.dtype, self.device)
        for num_rows in _WARMUP_ROWS:
            self._run(probe.batch(probe.prefix_rows(num_rows)), cache, self._kernel)
