"""Runs forward passes of one model over the paged KV cache."""

import logging
import platform
import time
from collections.abc import Sequence
from typing import Literal

import torch

from specdec.engine.attention.kv_cache import KVCache
from specdec.engine.batch import Batch
from specdec.engine.cuda.buckets import BucketedSteps
from specdec.engine.cuda.passes import EnqueuedPass
from specdec.engine.errors import ModelLoadError, SequenceStateError
from specdec.engine.model.beside import SkippingPass, prompt_rows
from specdec.engine.model.building import BuiltModel, build_model
from specdec.engine.model.fused import FusedDecoder
from specdec.engine.model.kv_budget import NOTHING, Beside
from specdec.engine.model.proofs.positions import LongRows
from specdec.engine.model.proofs.probe import SelfTest, tolerance
from specdec.engine.model.ragged import RaggedModel, StepModel
from specdec.engine.model.tapping import check_layer_ids, check_pass
from specdec.engine.parallel.rank_group import RankGroup
from specdec.engine.settings import EngineSettings
from specdec.engine.states.sessions import NoStates, SequenceStates, SessionStates
from specdec.engine.sublayers import SkippedSublayers
from specdec.engine.tap import HiddenTap

_WARMUP_ROWS = (1, 2, 8, 32)
_CHECKED_ROWS = (1, 7, 13, 37)
"""Rows of the steps whose replays are checked: of several buckets, full and padded."""
_logger = logging.getLogger(__name__)


class ModelRunner:
    """A model, its KV cache and the kernels that run it. Make it with ``load``.

    Each rank has one, over its shard; all must be called alike, and each gets all logits. Not thread-safe.
    """

    def __init__(self, settings: EngineSettings, built: BuiltModel) -> None:
        """Take over a built model: see ``load``."""
        loaded, cache = built.loaded, built.cache
        self.settings = settings
        self.device = loaded.device
        self.dtype = loaded.dtype
        self.identity = loaded.identity
        self.tokenizer_json = loaded.tokenizer.tokenizer_json
        self.tokenizer_config = loaded.tokenizer.config
        self.eos_token_ids = loaded.eos_token_ids
        self.max_model_len = loaded.max_model_len
        self.vocab_size = loaded.vocab_size  # number of the tokenizer's ids
        self.num_logits = loaded.num_logits  # columns of the logits: at least vocab_size
        self.num_parameters = loaded.num_parameters
        self.num_layers = loaded.num_layers
        self.hidden_size = loaded.hidden_size
        self.block_size = cache.block_size
        self.num_blocks = cache.num_blocks - built.num_spare_blocks
        self.num_kv_bytes = cache.num_bytes  # of this rank
        self.row_invariant = built.row_invariant
        self.kernels = built.kernels
        """The CPU's kernels, if any; for use between passes."""
        self.has_device_kernels = built.has_device_kernels
        """Whether Triton's kernels run on the device."""
        self.replays = built.replays
        self._step_model: StepModel = built.replays or built.step_model
        self._cache = cache
        self._has_states = cache.states is not None
        self._kernel_path = built.kernel_path
        self._checkpoint_format = loaded.checkpoint_format
        self._last_end: torch.cuda.Event | None = None  # of the last launched pass
        self._captured_taps: set[tuple[int, ...]] = set()

    @classmethod
    def load(cls, settings: EngineSettings, group: RankGroup | None = None, beside: Beside = NOTHING) -> "ModelRunner":
        """Load a model, check that it can be paged, and allocate its KV cache; in a group, this rank's part.

        On a GPU the cache leaves room for ``beside``.

        Raises ``ModelNotSupported`` if the gate refuses the model, ``ModelLoadError`` if files, memory or a demanded
        guarantee are missing. Sets ATen's threads for the whole process: 1 on CPU float32, as its kernels have their
        own threads.
        """
        return cls(settings, build_model(settings, group, beside))

    @property
    def numerics_id(self) -> str:
        """Names everything but the model that a row's bits depend on: equal ids give equal logits, if
        ``row_invariant``.
        """
        parts = [self.identity.dtype, self.device.type, self._kernel_path]
        if self.settings.weight_quantization != "none":
            parts.append(f"{self.settings.weight_quantization}-weights")
        if self.settings.kv_cache_dtype != "auto":
            parts.append(f"{self.settings.kv_cache_dtype}-kv")
        if self._checkpoint_format:
            parts.append(f"{self._checkpoint_format}-weights")
        if self.device.type == "cuda":
            parts.append(torch.cuda.get_device_name(self.device).replace(" ", "-"))
        else:
            parts.append(f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}")
        return "/".join([*parts, f"torch-{torch.__version__}", f"tp{self.settings.tensor_parallel_size}"])

    def forward(self, batch: Batch) -> torch.Tensor:
        """One pass over a ragged batch of T rows. Returns logits ``[R, num_logits]`` float32 of ``logits_indices``.

        All rows' keys and values are written before any row reads. Cost: one model forward over T rows.
        """
        if self._has_states and batch.states is None:
            raise SequenceStateError("a model with recurrent layers needs a scheduler with `session_states`")
        with torch.inference_mode():
            return self._step_model(batch, self._cache)

    def session_states(self) -> SequenceStates:
        """Bookkeeping of recurrent states for one engine, for its scheduler; empty without recurrent layers."""
        memory = self._cache.states
        return NoStates() if memory is None else SessionStates(memory.num_slots, memory.num_rows, self.block_size)

    def launch(self, batch: Batch) -> EnqueuedPass:
        """Start a pass on a GPU without waiting for it. See ``forward``."""
        launched = EnqueuedPass(lambda: self.forward(batch), self.device, self._last_end)
        self._last_end = launched.end
        return launched

    def check_tap(self, layer_ids: Sequence[int]) -> None:
        """Check that passes can return these hidden states (``specdec.engine.tap``), by a pass over another cache.

        Raises ``TapRefused``.
        """
        check_layer_ids(layer_ids, self.num_layers)
        if self.settings.tensor_parallel_size > 1:
            return  # a pass would need all ranks; their decoder has the config's layers
        probe = SelfTest(self.vocab_size, self.max_model_len, self.block_size, self.device)
        cache = KVCache(self._cache.geometries, probe.num_blocks, self.block_size, self._cache.dtype, self.device)
        batch = probe.batch(probe.prefix_rows(2))
        batch.tap = HiddenTap(tuple(layer_ids))
        with torch.inference_mode():
            check_pass(lambda: self._step_model(batch, cache), batch.tap, (2, len(layer_ids), self.hidden_size))

    @property
    def native_sampling(self) -> Literal["auto", "off"]:
        """Argument of `Sampler` for samplers of its logits: "off" on a GPU without Triton's kernels."""
        return "off" if self.device.type == "cuda" and not self.has_device_kernels else "auto"

    @property
    def fused(self) -> tuple[FusedDecoder, KVCache] | None:
        """The fused decoder and its cache; None if another step model runs."""
        return (self._step_model, self._cache) if isinstance(self._step_model, FusedDecoder) else None

    def without(self, skipped: SkippedSublayers) -> SkippingPass:
        """Passes of the same weights over the same cache that skip sublayers.

        Raises ``ModelLoadError`` if the step model cannot skip, and ``ValueError`` for missing layers.
        """
        skipped.check(self.num_layers)
        whole = self._step_model if self.replays is None else self.replays.forward
        if self.settings.tensor_parallel_size > 1 or not isinstance(whole, FusedDecoder | RaggedModel):
            raise ModelLoadError(
                f"layer_skip: needs one rank on the CPU, not {self.device.type} with tensor_parallel_size "
                f"{self.settings.tensor_parallel_size}; use a draft with skip_attention_layers and skip_mlp_layers"
            )
        step_model = whole.without(skipped)
        return SkippingPass(step_model, self._cache, step_model if isinstance(step_model, FusedDecoder) else None)

    def likeliest(self, token_ids: Sequence[int], step_model: StepModel | None = None) -> torch.Tensor:
        """The likeliest token after each of these, ``[T]``, over a temporary cache. ``step_model``: replaces the
        runner's.
        """
        rows = prompt_rows(token_ids, self.block_size)
        cache = KVCache(self._cache.geometries, len(rows.tables[0]), self.block_size, self._cache.dtype, self.device)
        with torch.inference_mode():
            logits = (step_model or self._step_model)(rows.batch(self.device), cache)
        return logits[:, : self.vocab_size].argmax(dim=1)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks ``(source, destination)`` in all layers."""
        self._cache.copy_blocks(pairs)

    def copy_slots(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy physical KV slots ``src[i] -> dst[i]`` in all layers; all are read before any is written."""
        self._cache.copy_slots(src, dst)

    def warmup(self, *, captures: bool = True) -> float:
        """Run a few shapes through a temporary cache, so that no real step pays for initialisation.

        Returns seconds per row of the largest shape; on a GPU of its second run, as the first may compile kernels. With
        ``captures`` it captures steps for replay; otherwise call ``capture_steps`` later.
        """
        probe = SelfTest(self.vocab_size, self.max_model_len, self.block_size, self.device)
        cache = KVCache(self._cache.geometries, probe.num_blocks, self.block_size, self._cache.dtype, self.device)
        row_s = 0.0
        with torch.inference_mode():
            for num_rows in _WARMUP_ROWS:
                for _ in range(2 if self.device.type == "cuda" else 1):
                    began_s = time.monotonic()
                    self._step_model(probe.batch(probe.prefix_rows(num_rows)), cache)
                    if self.device.type == "cuda":
                        torch.cuda.synchronize(self.device)
                    row_s = (time.monotonic() - began_s) / num_rows
        if captures:
            self.capture_steps()
        return row_s

    def capture_steps(self, tap_ids: tuple[int, ...] = ()) -> None:
        """Capture steps for replay before the first request, with hidden states of ``tap_ids``. Call it on all ranks.
        Does nothing without replays or if already captured.
        """
        if self.replays is None or tap_ids in self._captured_taps:
            return
        self._captured_taps.add(tap_ids)
        probe = SelfTest(self.vocab_size, self.max_model_len, self.block_size, self.device)
        with torch.inference_mode():
            self.replays.prepare(tap_ids=tap_ids)
            self._check_replays(self.replays, probe, tap_ids)

    def _check_replays(self, replays: BucketedSteps, probe: SelfTest, tap_ids: tuple[int, ...]) -> None:
        """Stop replaying if a replay differs from an uncaptured step on new tokens, as modules may have kept values of
        the capture: steps of several buckets, and rows and a tree after contexts of several splits of attention. The
        cache must be empty.
        """
        batches = [probe.batch(rows) for num_rows in _CHECKED_ROWS if len(rows := probe.prefix_rows(num_rows)) > 0]
        long = LongRows((), self._cache.geometries, self.max_model_len, self.vocab_size, self.block_size)
        if long.num_blocks <= self.num_blocks:
            long.fill(self._cache)
            batches.append(long.batch(self.device))
        if probe.num_blocks > self.num_blocks:
            return
        for batch in batches:
            batch.tap = HiddenTap(tap_ids) if tap_ids else None
            replayed = [replays(batch, self._cache).clone(), *_told(batch.tap)]
            expected = [replays.forward(batch, self._cache), *_told(batch.tap)]
            for found, wanted in zip(replayed, expected, strict=True):
                error = float((found - wanted).float().square().mean().sqrt() / wanted.float().std())
                if not error <= tolerance(self.dtype):
                    figures = {"error": error, "num_rows": len(batch.input_ids)}
                    _logger.error("captured steps compute wrong logits and are not used", extra=figures)
                    replays.drop(for_good=True)
                    return

    def release_memory(self) -> None:
        """Give back device memory that only makes steps faster: the captured graphs, captured again on use."""
        if self.replays is not None:
            self.replays.capture.drop()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs; 0: kernels are launched one by one."""
        return 0 if self.replays is None else self.replays.capture.num_graphs

    @property
    def row_edges(self) -> tuple[int, ...]:
        """Numbers of rows to which steps are padded, ascending, so that rows up to the next are free; empty: none."""
        return () if self.replays is None else self.replays.row_edges


def _told(tap: HiddenTap | None) -> list[torch.Tensor]:
    return [] if tap is None or tap.states is None else [tap.states]
