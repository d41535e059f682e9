"""Runs forward passes of one model over the paged KV cache. Knows nothing of sessions, drafts or targets."""

import logging
import platform
import time
from collections.abc import Sequence
from functools import partial

import torch

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import RecordingKernel
from specdec.engine.attention.torch_kernels import GatherAttention, TiledAttention
from specdec.engine.batch import Batch
from specdec.engine.cuda.passes import EnqueuedPass
from specdec.engine.errors import ModelLoadError, ModelNotSupported
from specdec.engine.model.beside import SkippingPass, prompt_rows
from specdec.engine.model.device_choice import (
    Replays,
    device_attention,
    device_decoder,
    is_on_gpu,
    triton_path,
    with_replays,
)
from specdec.engine.model.fused import FusedDecoder, is_fusable
from specdec.engine.model.gate import refusing
from specdec.engine.model.kv_budget import CudaMemory, affordable_kv_bytes
from specdec.engine.model.linear import TorchWeight, make_modules_row_invariant, torch_path
from specdec.engine.model.loader import LoadedModel, load_model
from specdec.engine.model.probe import Probe, ProbeLog, tolerance
from specdec.engine.model.ragged import RaggedModel, StepModel
from specdec.engine.model.tapping import check_layer_ids, check_pass
from specdec.engine.native.build import NativeUnavailable
from specdec.engine.native.kernels import KERNEL_VERSION, NativeAttention, NativeKernels
from specdec.engine.native.packing import FORMATS, FORMATS_OF_QUANTIZED
from specdec.engine.native.variants import UnsupportedIsa
from specdec.engine.parallel.rank_group import RankGroup
from specdec.engine.parallel.sharding import shard_model
from specdec.engine.settings import EngineSettings
from specdec.engine.sublayers import SkippedSublayers
from specdec.engine.tap import HiddenTap

_CPU_KV_BYTES = 1 << 30
_INSTALL_KERNELS = "install specdec from a wheel for this machine, or a C++ compiler (Debian: apt-get install g++)"
_WARMUP_ROWS = (1, 2, 8, 32)
_CHECKED_ROWS = 7
_logger = logging.getLogger(__name__)

DenseLogits = dict[tuple[int, ...], torch.Tensor]


class ModelRunner:
    """A model, its KV cache and the kernels that run it. Make it with ``load``.

    With several ranks, each has one, over its shard: all of them must be called alike. Every rank gets all logits.
    Not thread-safe: one thread at a time may call it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: EngineSettings,
        step_model: StepModel,
        cache: KVCache,
        kernel_path: str,
    ) -> None:
        self.settings = settings
        self.device = loaded.device
        self.dtype = loaded.dtype
        self.identity = loaded.identity
        self.tokenizer_json = loaded.tokenizer.tokenizer_json
        self.tokenizer_config = loaded.tokenizer.config
        self.eos_token_ids = loaded.eos_token_ids
        self.max_model_len = loaded.max_model_len
        self.vocab_size = loaded.vocab_size  # ids that the tokenizer can name
        self.num_logits = loaded.num_logits  # columns of the logits: at least vocab_size
        self.num_parameters = loaded.num_parameters
        self.num_layers = loaded.num_layers
        self.hidden_size = loaded.hidden_size
        self.block_size = cache.block_size
        self.num_blocks = cache.num_blocks
        self.num_kv_bytes = cache.num_bytes  # of this rank
        self.row_invariant = False
        self.kernels: NativeKernels | None = None
        """Those of the CPU, where there are any; for whatever else runs between passes."""
        self.replays: Replays | None = None
        self._step_model = step_model
        self._cache = cache
        self._kernel_path = kernel_path
        self._checkpoint_format = loaded.checkpoint_format
        self._last_end: torch.cuda.Event | None = None  # of the pass that was launched last

    @classmethod
    def load(cls, settings: EngineSettings, group: RankGroup | None = None) -> "ModelRunner":
        """Load a model, prove that it can be paged, and allocate its KV cache: this rank's part of each, in a group.

        Raises ``ModelNotSupported`` where the gate refuses the model, ``ModelLoadError`` where files, memory
        or a demanded guarantee are missing. Sets ATen's threads for the whole process: 1 on CPU float32,
        whose kernels bring their own.
        """
        return _RunnerBuilder(settings, group).build()

    @property
    def numerics_id(self) -> str:
        """What a row's bits depend on besides the model: equal ids, equal logits (if ``row_invariant``)."""
        parts = [self.identity.dtype, self.device.type, self._kernel_path]
        if self.settings.weight_quantization != "none":
            parts.append(f"{self.settings.weight_quantization}-weights")
        if self._checkpoint_format:
            parts.append(f"{self._checkpoint_format}-weights")
        if self.device.type == "cuda":
            parts.append(torch.cuda.get_device_name(self.device).replace(" ", "-"))
        else:
            parts.append(f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}")
        return "/".join([*parts, f"torch-{torch.__version__}", f"tp{self.settings.tensor_parallel_size}"])

    def forward(self, batch: Batch) -> torch.Tensor:
        """One pass over a ragged batch of T rows; returns logits ``[R, num_logits]`` float32 of
        ``logits_indices``.

        Every row's key and value are written to its slot before any row reads. Cost: one model forward over T
        rows.
        """
        with torch.inference_mode():
            return self._step_model(batch, self._cache)

    def launch(self, batch: Batch) -> EnqueuedPass:
        """Begin a pass, on a GPU; nobody waits for it. See ``forward``."""
        launched = EnqueuedPass(lambda: self.forward(batch), self.device, self._last_end)
        self._last_end = launched.end
        return launched

    def check_tap(self, layer_ids: Sequence[int]) -> None:
        """Make sure that batches may have a tap of these ids (``specdec.engine.tap``), by a pass over another cache.

        Raises ``TapRefused``.
        """
        check_layer_ids(layer_ids, self.num_layers)
        if self.settings.tensor_parallel_size > 1:
            return  # a pass would need all ranks; what they run is transformers' modules, whose layers were found
        probe = Probe(self.vocab_size, self.max_model_len, self.block_size, self.device)
        cache = KVCache(self._cache.geometries, probe.num_blocks, self.block_size, self.dtype, self.device)
        batch = probe.batch(probe.prefix_rows(2))
        batch.tap = HiddenTap(tuple(layer_ids))
        with torch.inference_mode():
            check_pass(lambda: self._step_model(batch, cache), batch.tap, (2, len(layer_ids), self.hidden_size))

    @property
    def fused(self) -> tuple[FusedDecoder, KVCache] | None:
        """The decoder that runs all passes and the cache that it runs them over, where it is a fused one."""
        return (self._step_model, self._cache) if isinstance(self._step_model, FusedDecoder) else None

    @property
    def replayed(self) -> tuple[Replays, KVCache] | None:
        """What replays passes and the cache that it runs them over, whose last block is its own, where there is any."""
        return None if self.replays is None else (self.replays, self._cache)

    def without(self, skipped: SkippedSublayers) -> SkippingPass:
        """Passes of the same weights over the same cache that leave sublayers out.

        Raises ``ModelLoadError`` where what runs the model cannot, and ``ValueError`` for layers that are not there.
        """
        skipped.check(self.num_layers)
        whole = self._step_model if self.replays is None else self.replays.forward
        if self.settings.tensor_parallel_size > 1 or not isinstance(whole, FusedDecoder | RaggedModel):
            raise ModelLoadError(
                f"layer_skip: passes without sublayers are for one rank on the CPU, not for {self.device.type} with "
                f"{self.settings.tensor_parallel_size}; use a draft with skip_attention_layers and skip_mlp_layers"
            )
        step_model = whole.without(skipped)
        return SkippingPass(step_model, self._cache, step_model if isinstance(step_model, FusedDecoder) else None)

    def likeliest(self, token_ids: Sequence[int], step_model: StepModel | None = None) -> torch.Tensor:
        """The likeliest token after each of these, ``[T]``, over a cache of its own. ``step_model``: in its place."""
        rows = prompt_rows(token_ids, self.block_size)
        cache = KVCache(self._cache.geometries, len(rows.tables[0]), self.block_size, self.dtype, self.device)
        with torch.inference_mode():
            logits = (step_model or self._step_model)(rows.batch(self.device), cache)
        return logits[:, : self.vocab_size].argmax(dim=1)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks ``(source, destination)`` in all layers."""
        self._cache.copy_blocks(pairs)

    def copy_slots(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy physical KV slots ``src[i] -> dst[i]`` in all layers; all are read before any is written."""
        self._cache.copy_slots(src, dst)

    def warmup(self) -> float:
        """Run a few shapes through a small cache of its own, so that no real step pays for initialisation.

        Returns what a row of the largest of them took, in seconds; on a GPU, what it took to say so. Captures steps
        where they are replayed.
        """
        probe = Probe(self.vocab_size, self.max_model_len, self.block_size, self.device)
        cache = KVCache(self._cache.geometries, probe.num_blocks, self.block_size, self.dtype, self.device)
        row_s = 0.0
        with torch.inference_mode():
            for num_rows in _WARMUP_ROWS:
                began_s = time.monotonic()
                self._step_model(probe.batch(probe.prefix_rows(num_rows)), cache)
                row_s = (time.monotonic() - began_s) / num_rows
            if self.replays is not None:
                most = min(self.max_model_len, self.num_blocks * self.block_size)
                self.replays.prepare(most, is_limited=self.settings.tensor_parallel_size == 1)
                self._check_replays(self.replays, probe)
        return row_s

    def _check_replays(self, replays: Replays, probe: Probe) -> None:
        """Stop replaying where a step gives other logits than it does uncaptured, on other tokens than at its capture:
        modules may have kept what they computed then. The cache must hold nothing yet.
        """
        if probe.num_blocks > self.num_blocks:
            return
        batch = probe.batch(probe.prefix_rows(_CHECKED_ROWS))
        replayed = replays(batch, self._cache).clone()
        cache = KVCache(self._cache.geometries, probe.num_blocks, self.block_size, self.dtype, self.device)
        expected = replays.forward(batch, cache)
        error = float((replayed - expected).square().mean().sqrt() / expected.std())
        if not error <= tolerance(self.dtype):
            _logger.error("captured steps compute something else, and are not used", extra={"logit_error": error})
            replays.stop()

    @property
    def row_edges(self) -> tuple[int, ...]:
        """Numbers of rows, rising, that steps are padded to, so that rows up to the next one are free; empty: none."""
        return () if self.replays is None else self.replays.row_edges


class _RunnerBuilder:
    """The stages of loading: dense reference, kernels, gate, fusion, cache."""

    def __init__(self, settings: EngineSettings, group: RankGroup | None) -> None:
        self._settings = settings
        self._group = group
        self._loaded = load_model(settings, group)
        loaded = self._loaded
        self._is_quantized = settings.weight_quantization != "none"
        self._is_exact = not is_on_gpu(loaded.device) and loaded.dtype == torch.float32
        if settings.deterministic and not self._is_exact and not is_on_gpu(loaded.device):
            raise ModelLoadError("deterministic needs float32 on CPU, or a GPU")
        self._probe = Probe(loaded.vocab_size, loaded.max_model_len, settings.block_size, loaded.device)
        self._no_kernels = ""  # why there are none, and what to do about it
        self._kernels = self._make_kernels() if self._is_exact else None

    @torch.inference_mode()
    def build(self) -> ModelRunner:
        """Run all stages."""
        settings, loaded = self._settings, self._loaded
        if loaded.device.type == "cpu":
            torch.set_num_threads(1 if self._is_exact else settings.num_threads)
        if self._group is not None:
            self._group.wait_for_all()  # from here on no rank waits long for another
        expected = self._dense_logits() if settings.self_test else {}
        if self._group is not None:
            shard_model(loaded.model, self._group)  # expected is what transformers' own wrappers made of the shards
        ragged = RaggedModel(loaded.model, TiledAttention())
        recorded = ragged.record_attention(self._probe)
        if is_on_gpu(loaded.device):
            ragged.kernel = device_attention(recorded.geometries)
        step_model, kernel_path, row_invariant = self._choose_model(ragged, recorded, expected)
        is_gathered = isinstance(step_model, RaggedModel) and isinstance(step_model.kernel, GatherAttention)
        has_spare = is_on_gpu(loaded.device) and not is_gathered  # for rows of padding
        cache = self._allocate(step_model, recorded.geometries, num_spare_blocks=int(has_spare))
        replays = with_replays(step_model, cache) if has_spare else None
        runner = ModelRunner(loaded, settings, replays or step_model, cache, kernel_path)
        runner.replays = replays
        runner.num_blocks -= int(has_spare)
        runner.row_invariant = row_invariant
        runner.kernels = self._kernels
        return runner

    def _choose_model(
        self, ragged: RaggedModel, recorded: RecordingKernel, expected: DenseLogits
    ) -> tuple[StepModel, str, bool]:
        """The fastest step model that passes the self-test, its kernel path, whether it is row-invariant."""
        kernels, loaded = self._kernels, self._loaded
        on_device, is_ordered = None, bool(self._settings.deterministic)
        if is_on_gpu(loaded.device) and self._settings.fused == "auto":
            on_device = device_decoder(
                loaded.model, recorded, loaded.max_model_len, row_invariant=is_ordered, group=self._group
            )
        if on_device is not None:
            error, row_invariant = self._test(on_device, recorded.geometries, expected)
            row_invariant = is_ordered and (row_invariant or not expected)  # torch's products go by the number of rows
            if self._agreed(error <= tolerance(loaded.dtype) and row_invariant == is_ordered):
                loaded.release_model()
                path = triton_path("ordered-decoder" if is_ordered else "decoder", loaded.device)
                return on_device, path, row_invariant
            _logger.error(
                "the GPU's decoder failed its self-test and is not used",
                extra={"logit_error": error, "row_invariant": row_invariant},
            )
            loaded.model = load_model(self._settings, self._group).model
            if self._group is not None:
                shard_model(loaded.model, self._group)
            ragged = RaggedModel(loaded.model, ragged.kernel)
        if (
            kernels is not None
            and self._group is None  # the fused decoder has no place for collectives
            and self._settings.fused == "auto"
            and is_fusable(loaded.model, recorded.geometries, recorded.options, kernels.max_head_dim)
        ):
            fused = FusedDecoder(loaded.model, kernels, recorded.geometries, recorded.options, loaded.max_model_len)
            error, row_invariant = self._test(fused, recorded.geometries, expected)
            if error <= tolerance(loaded.dtype) and row_invariant:
                loaded.release_model()
                return fused, f"fused-{KERNEL_VERSION}-{kernels.variant}", row_invariant
            _logger.error("the fused decoder failed its self-test and is not used", extra={"logit_error": error})
            loaded.model = ragged.model = load_model(self._settings).model
            ragged = RaggedModel(loaded.model, ragged.kernel)
        kernel_path = self._install_kernels(ragged)
        error, row_invariant = self._test(ragged, recorded.geometries, expected)
        if not error <= tolerance(loaded.dtype):
            raise ModelNotSupported(
                loaded.model.config.model_type,
                f"paged logits differ from dense ones by {error:.2g} of their spread: something besides keys "
                "and values decides its attention",
            )
        row_invariant = row_invariant and self._is_exact
        if self._no_kernels:
            if not expected:
                self._no_kernels += " (and self_test is off, which would show whether torch suffices)"
            promise = "holds" if row_invariant else "is not given"
            _logger.warning(f"no native kernels, row invariance {promise}: {self._no_kernels}")
        if self._settings.deterministic and not row_invariant:
            why = self._no_kernels or "a row's logits differ with its company"
            if is_on_gpu(loaded.device):
                why = "GPUs have row-invariant kernels for models of Llama's shape"
            raise ModelLoadError(f"{loaded.identity.name} is not row-invariant on this machine: {why}")
        return ragged, kernel_path, row_invariant

    def _agreed(self, is_good: bool) -> bool:
        """Whether it is at all ranks."""
        return is_good if self._group is None else bool(self._group.smallest(int(is_good)))

    def _make_kernels(self) -> NativeKernels | None:
        if self._settings.native == "off":
            self._no_kernels = "native is off"
            return None
        try:
            return NativeKernels(self._settings.num_threads, FORMATS_OF_QUANTIZED if self._is_quantized else FORMATS)
        except UnsupportedIsa as error:
            raise ModelLoadError(str(error)) from error
        except NativeUnavailable as error:
            self._no_kernels = f"{error}; {_INSTALL_KERNELS}"
            if self._is_quantized:
                raise ModelLoadError(f"weight_quantization needs native kernels: {self._no_kernels}") from error
            if self._settings.native == "on":
                raise ModelLoadError(f"native kernels were asked for: {self._no_kernels}") from error
            return None

    def _install_kernels(self, ragged: RaggedModel) -> str:
        """Give a transformers model the best kernels at hand; returns the name of the path."""
        if not self._is_exact:
            is_torch = isinstance(ragged.kernel, TiledAttention | GatherAttention)
            return "torch" if is_torch else triton_path("attention", self._loaded.device)
        if self._kernels is None:
            make_modules_row_invariant(ragged.model, partial(TorchWeight, num_threads=self._settings.num_threads))
            return torch_path()
        make_modules_row_invariant(ragged.model, self._kernels.pack)
        ragged.kernel = NativeAttention(self._kernels)
        return f"native-{KERNEL_VERSION}-{self._kernels.variant}"

    def _dense_logits(self) -> DenseLogits:
        """Logits ``[T, V]`` of the probe's sequences by the model's own attention."""
        expected = {}
        with refusing(self._loaded.model.config.model_type):
            for tokens in self._probe.sequences:
                ids = torch.tensor([tokens], device=self._loaded.device)
                expected[tuple(tokens)] = self._loaded.model(input_ids=ids, use_cache=False).logits[0].float()
        return expected

    def _test(
        self, step_model: StepModel, geometries: list[LayerGeometry], expected: DenseLogits
    ) -> tuple[float, bool]:
        """Run the self-test; returns the error against dense logits and whether rows were invariant.

        Without it the kernels' own row invariance is believed: their order of sums is theirs. torch's is not.
        """
        loaded, probe = self._loaded, self._probe
        if not expected:
            return 0.0, self._kernels is not None
        cache = KVCache(geometries, probe.num_blocks, self._settings.block_size, loaded.dtype, loaded.device)
        with refusing(loaded.identity.architecture):
            log: ProbeLog = probe.run(step_model, cache)
        return log.error(lambda tokens: expected[tuple(tokens.tolist())], probe.sequences), log.row_invariant

    def _allocate(self, step_model: StepModel, geometries: list[LayerGeometry], num_spare_blocks: int) -> KVCache:
        settings, loaded = self._settings, self._loaded
        num_blocks = settings.num_blocks or self._num_blocks_for_budget(step_model, geometries)
        if self._group is not None:
            num_blocks = self._group.smallest(num_blocks)  # one block table serves all ranks
        return KVCache(geometries, num_blocks + num_spare_blocks, settings.block_size, loaded.dtype, loaded.device)

    def _num_blocks_for_budget(self, step_model: StepModel, geometries: list[LayerGeometry]) -> int:
        settings, loaded = self._settings, self._loaded
        block_bytes = sum(g.num_elements for g in geometries) * settings.block_size * loaded.dtype.itemsize
        budget = settings.kv_cache_memory_bytes
        if budget is None and loaded.device.type == "cuda":
            budget = affordable_kv_bytes(
                CudaMemory(loaded.device),
                step_model,
                geometries,
                num_rows=settings.max_batch_tokens,
                max_model_len=loaded.max_model_len,
                num_logits=loaded.num_logits,
                block_size=settings.block_size,
                dtype=loaded.dtype,
                device=loaded.device,
                memory_fraction=settings.gpu_memory_fraction,
            )
        budget = _CPU_KV_BYTES if budget is None else budget
        most_useful = settings.max_batch_seqs * (-(-loaded.max_model_len // settings.block_size) + 4)
        num_blocks = min(budget // block_bytes, most_useful)
        if num_blocks < 2:
            raise ModelLoadError(f"a KV budget of {budget} bytes does not hold two blocks of {block_bytes} bytes")
        return int(num_blocks)
