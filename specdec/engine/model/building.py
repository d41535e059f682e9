"""Builds a model from settings: loads it, checks it, chooses the fastest kernels that pass, and allocates the KV
cache.
"""

import logging
import math
from dataclasses import dataclass
from functools import partial

import torch

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry, stored_dtype
from specdec.engine.attention.latent import LATENT_VERSION, HeadPacker, pack_latents
from specdec.engine.attention.paged import RecordingKernel
from specdec.engine.attention.torch_kernels import GatherAttention, TiledAttention
from specdec.engine.cuda.buckets import BucketedSteps
from specdec.engine.cuda.passes import CAPTURE_BYTES
from specdec.engine.errors import ModelLoadError, ModelNotSupported
from specdec.engine.model.device_choice import (
    device_attention,
    device_decoder,
    is_kernels_fault,
    is_on_gpu,
    missing_kernels,
    triton_path,
    with_replays,
)
from specdec.engine.model.fused import FusedDecoder, is_fusable
from specdec.engine.model.kv_budget import NOTHING, Beside, CudaMemory, affordable_kv_bytes
from specdec.engine.model.linear import TorchHeads, TorchWeight, WeightPacker, torch_path
from specdec.engine.model.loader import LoadedModel, load_model
from specdec.engine.model.mixtures.blocks import make_model_row_invariant
from specdec.engine.model.mixtures.routes import MOST_CHANGED, Routes
from specdec.engine.model.mixtures.weights import EXPERTS_VERSION, ExpertsPacker, TorchExperts, native_experts
from specdec.engine.model.model_check import refusing
from specdec.engine.model.probe import ProbeLog, SelfTest, tolerance
from specdec.engine.model.proofs.positions import FarProof
from specdec.engine.model.proofs.rehearsal import rehearse
from specdec.engine.model.ragged import RaggedModel, StepModel
from specdec.engine.model.switches import shortened
from specdec.engine.native.build import NativeUnavailable
from specdec.engine.native.kernels import KERNEL_VERSION, NativeAttention, NativeKernels
from specdec.engine.native.latent import NativeHeads
from specdec.engine.native.packing import FORMATS, FORMATS_OF_QUANTIZED
from specdec.engine.native.variants import UnsupportedIsa
from specdec.engine.parallel.rank_group import RankGroup
from specdec.engine.parallel.sharding import shard_model
from specdec.engine.recurrent.layers import RECURRENT_VERSION
from specdec.engine.recurrent.native import NativeRecurrences
from specdec.engine.settings import EngineSettings
from specdec.engine.states.memory import CellShape, StateMemory, affordable_states

_CPU_KV_BYTES = 1 << 30
_INSTALL_KERNELS = "install specdec from a wheel for this machine, or a C++ compiler (Debian: apt-get install g++)"
_logger = logging.getLogger(__name__)

DenseLogits = dict[tuple[int, ...], torch.Tensor]


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model that has passed its self-test, with its kernels and KV cache."""

    loaded: LoadedModel
    step_model: StepModel
    kernel_path: str
    """Name of its kernels in the numerics id."""
    row_invariant: bool
    """Whether a row's logits are the same bits in any batch."""
    cache: KVCache
    num_spare_blocks: int
    """Number of the cache's last blocks, which are for padding rows."""
    replays: BucketedSteps | None
    """Replays captured small steps; None: no step is captured."""
    kernels: NativeKernels | None
    """The CPU's kernels, if any."""
    has_device_kernels: bool
    """Whether Triton's kernels run on the device."""


def build_model(settings: EngineSettings, group: RankGroup | None, beside: Beside = NOTHING) -> BuiltModel:
    """Build a model, or this rank's part of it in a group. See ``ModelRunner.load``."""
    return _Builder(settings, group, beside).build()


class _Builder:
    """The stages of loading: dense reference, kernels, gate, fusion, cache."""

    def __init__(self, settings: EngineSettings, group: RankGroup | None, beside: Beside) -> None:
        self._settings = settings
        self._beside = beside
        self._group = group
        self._loaded = load_model(settings, group, rehearse)
        loaded = self._loaded
        self._is_quantized = settings.weight_quantization != "none"
        self._kv_dtype = stored_dtype(settings.kv_cache_dtype, loaded.dtype)
        self._most_error = tolerance(
            loaded.dtype, is_fp8="fp8" in (settings.weight_quantization, settings.kv_cache_dtype)
        )
        self._is_exact = not is_on_gpu(loaded.device) and loaded.dtype == torch.float32
        if settings.deterministic and not self._is_exact and not is_on_gpu(loaded.device):
            raise ModelLoadError("deterministic: needs dtype float32 on a CPU, or a GPU")
        self._probe = SelfTest(loaded.vocab_size, loaded.max_model_len, settings.block_size, loaded.device)
        self._far: FarProof | None = None
        self._routes = Routes(loaded.model)
        self._cells: list[CellShape] = []  # of recurrent layers
        self._no_kernels = ""  # why there are none, and the remedy
        self._kernels = self._make_kernels() if self._is_exact else None
        self._has_device_kernels = False

    @torch.inference_mode()
    def build(self) -> BuiltModel:
        """Run all stages."""
        settings, loaded = self._settings, self._loaded
        if loaded.device.type == "cpu":
            torch.set_num_threads(1 if self._is_exact else settings.num_threads)
        if self._group is not None:
            self._group.wait_for_all()  # later waits between ranks are short
        self._has_device_kernels = is_on_gpu(loaded.device) and self._find_device_kernels()
        expected = self._dense_logits(self._routes) if settings.self_test else {}
        with shortened(loaded.model) as has_switches:
            short_routes = Routes(loaded.model)
            short = self._dense_logits(short_routes) if settings.self_test and has_switches else {}
        if self._group is not None:
            shard_model(loaded.model, self._group)  # `expected` came from transformers' own wrappers
        ragged = RaggedModel(loaded.model, TiledAttention())
        if short:
            self._prove_switches(ragged, short, short_routes)
        recorded = ragged.record_attention(self._probe)
        self._cells = ragged.recurrent.shapes
        if is_on_gpu(loaded.device):
            ragged.kernel = device_attention(recorded.geometries, has_kernels=self._has_device_kernels)
        if expected:
            self._far = FarProof(loaded, recorded, ragged.mask_windows, settings.block_size, self._kv_dtype)
        step_model, kernel_path, row_invariant = self._choose_model(ragged, recorded, expected)
        is_gathered = isinstance(step_model, RaggedModel) and isinstance(step_model.kernel, GatherAttention)
        has_spare = is_on_gpu(loaded.device) and not is_gathered  # block for padding rows
        cache = self._allocate(step_model, recorded.geometries, num_spare_blocks=int(has_spare))
        return BuiltModel(
            loaded,
            step_model,
            kernel_path,
            row_invariant,
            cache,
            num_spare_blocks=int(has_spare),
            replays=with_replays(step_model, cache, loaded.max_model_len, is_alone=self._group is None)
            if has_spare
            else None,
            kernels=self._kernels,
            has_device_kernels=self._has_device_kernels,
        )

    def _choose_model(
        self, ragged: RaggedModel, recorded: RecordingKernel, expected: DenseLogits
    ) -> tuple[StepModel, str, bool]:
        """The fastest step model that passes the self-test, its kernel path, and whether it is row-invariant."""
        kernels, loaded = self._kernels, self._loaded
        on_device, is_ordered = None, bool(self._settings.deterministic)
        is_fp8 = self._settings.weight_quantization == "fp8"
        if self._has_device_kernels and self._settings.fused == "auto":
            on_device = device_decoder(
                loaded.model,
                recorded,
                loaded.max_model_len,
                row_invariant=is_ordered,
                is_fp8=is_fp8,
                group=self._group,
            )
        if on_device is not None:
            error, row_invariant = self._tried(on_device, recorded.geometries, expected)
            row_invariant = is_ordered and (row_invariant or not expected)  # torch's products depend on the batch
            if self._agreed(error <= self._most_error and row_invariant == is_ordered):
                loaded.release_model()
                path = triton_path("ordered-decoder" if is_ordered else "decoder", loaded.device)
                return on_device, path, row_invariant
            if is_fp8:
                raise ModelLoadError(f"weight_quantization: fp8 changes the logits by {error:.2g} of their spread")
            _logger.error(
                "the GPU's decoder failed its self-test and is not used",
                extra={"logit_error": error, "row_invariant": row_invariant},
            )
            loaded.model = load_model(self._settings, self._group).model
            if self._group is not None:
                shard_model(loaded.model, self._group)
            ragged = RaggedModel(loaded.model, ragged.kernel, ragged.mask_windows)
        if is_fp8:
            why = self._no_kernels or f"{loaded.identity.architecture} has not Llama's shape"
            raise ModelLoadError(f"weight_quantization: fp8 needs the GPU's own decoder: {why}")
        if (
            kernels is not None
            and self._kv_dtype == loaded.dtype
            and self._group is None  # the fused decoder has no collectives
            and self._settings.fused == "auto"
            and is_fusable(
                loaded.model, recorded.geometries, recorded.options, kernels.max_head_dim, takes_mixtures=True
            )
        ):
            fused = FusedDecoder(loaded.model, kernels, recorded.geometries, recorded.options, loaded.max_model_len)
            error, row_invariant = self._test(fused, recorded.geometries, expected)
            if error <= self._most_error and row_invariant:
                loaded.release_model()
                path = f"fused-{KERNEL_VERSION}-{kernels.variant}"
                return fused, f"{path}-experts-{EXPERTS_VERSION}" if fused.has_mixtures else path, row_invariant
            _logger.error("the fused decoder failed its self-test and is not used", extra={"logit_error": error})
            loaded.model = ragged.model = load_model(self._settings).model
            ragged = RaggedModel(loaded.model, ragged.kernel, ragged.mask_windows)
        kernel_path = self._install_kernels(ragged)
        error, row_invariant = self._tried(ragged, recorded.geometries, expected)
        if self._has_device_kernels and not error < math.inf:
            ragged.kernel = GatherAttention()
            kernel_path = self._install_kernels(ragged)
            error, row_invariant = self._test(ragged, recorded.geometries, expected)
        if not error <= self._most_error:
            if self._kv_dtype != loaded.dtype and math.isfinite(error):
                raise ModelLoadError(f"kv_cache_dtype: fp8 changes the logits by {error:.2g} of their spread; set auto")
            raise ModelNotSupported(
                loaded.model.config.model_type,
                f"paged logits differ from dense ones by {error:.2g} of their spread: its attention depends on more "
                "than keys and values",
            )
        row_invariant = row_invariant and self._is_exact
        if self._no_kernels:
            if not expected:
                self._no_kernels += " (and self_test is off, which would test torch's row invariance)"
            promise = "holds" if row_invariant else "is not given"
            note = "steps are several times slower" if is_on_gpu(loaded.device) else f"row invariance {promise}"
            _logger.warning(f"no native kernels, {note}: {self._no_kernels}")
        if self._settings.deterministic and not row_invariant:
            why = self._no_kernels or "a row's logits depend on the rest of the batch"
            if is_on_gpu(loaded.device):
                why = self._no_kernels or "row-invariant GPU kernels exist only for models of Llama's shape"
            raise ModelLoadError(f"deterministic: {loaded.identity.name} is not row-invariant here: {why}")
        return ragged, kernel_path, row_invariant

    def _prove_switches(self, ragged: RaggedModel, expected: DenseLogits, routes: Routes) -> None:
        """Compare paged logits with dense ones on both sides of every window and scale. Raises ModelNotSupported."""
        loaded = self._loaded
        with shortened(loaded.model):
            recorded = ragged.record_attention(self._probe)
            self._cells = ragged.recurrent.shapes
            error, _ = self._test(ragged, recorded.geometries, expected, routes)
        if not error <= self._most_error:
            raise ModelNotSupported(
                loaded.model.config.model_type,
                f"beyond its windows or attention scales, paged logits differ from dense ones by "
                f"{error:.2g} of their spread",
            )

    def _tried(
        self, step_model: StepModel, geometries: list[LayerGeometry], expected: DenseLogits
    ) -> tuple[float, bool]:
        """`_test`, with an infinite error if Triton cannot compile a kernel for this GPU; with ranks this raises."""
        try:
            return self._test(step_model, geometries, expected)
        except Exception as error:
            if self._group is not None or not is_kernels_fault(error):
                raise
            _logger.exception("a GPU kernel could not be compiled; slower operations replace it")
            return math.inf, False

    def _find_device_kernels(self) -> bool:
        """Whether Triton's kernels run on this GPU, and on those of all ranks; else a warning says why not."""
        missing = missing_kernels(self._loaded.device)
        if self._agreed(not missing):
            return True
        self._no_kernels = f"no GPU kernels: {missing or 'another rank has none'}"
        if self._settings.deterministic:
            raise ModelLoadError(f"deterministic: {self._no_kernels}")
        return False

    def _agreed(self, is_good: bool) -> bool:
        """Whether `is_good` holds at all ranks."""
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
                raise ModelLoadError(f"weight_quantization: needs native kernels: {self._no_kernels}") from error
            if self._settings.native == "on":
                raise ModelLoadError(f"native: on, but there are no kernels: {self._no_kernels}") from error
            return None

    def _install_kernels(self, ragged: RaggedModel) -> str:
        """Give a transformers model the best available kernels. Returns the path's name."""
        if not self._is_exact:
            is_torch = isinstance(ragged.kernel, TiledAttention | GatherAttention)
            return "torch" if is_torch else triton_path("attention", self._loaded.device)
        packers: tuple[WeightPacker, ExpertsPacker, HeadPacker]
        if self._kernels is None:
            num_threads, path = self._settings.num_threads, torch_path()
            packers = (
                partial(TorchWeight, num_threads=num_threads),
                partial(TorchExperts, num_threads=num_threads),
                partial(TorchHeads, num_threads=num_threads),
            )
        else:
            path = f"native-{KERNEL_VERSION}-{self._kernels.variant}"
            packers = self._kernels.pack, partial(native_experts, self._kernels), partial(NativeHeads, self._kernels)
            if self._kv_dtype == self._loaded.dtype:
                ragged.kernel = NativeAttention(self._kernels)
            ragged.recurrent.recurrences = NativeRecurrences(self._kernels)
        pack, pack_experts, pack_heads = packers
        if pack_latents(ragged.model, pack_heads):
            path += f"-latent-{LATENT_VERSION}"
        if make_model_row_invariant(ragged.model, pack, pack_experts):
            path += f"-experts-{EXPERTS_VERSION}"
        if ragged.recurrent:
            path += f"-recurrent-{RECURRENT_VERSION}"
        return path

    def _dense_logits(self, routes: Routes) -> DenseLogits:
        """Logits ``[T, V]`` of the probe's sequences by the model's own attention; records their routes."""
        expected = {}
        with refusing(self._loaded.model.config.model_type):
            for tokens in self._probe.sequences:
                ids = torch.tensor([tokens], device=self._loaded.device)
                with routes.recording([tuple(tokens[: end + 1]) for end in range(len(tokens))]):
                    logits = self._loaded.model(input_ids=ids, use_cache=False).logits[0]
                expected[tuple(tokens)] = logits.float()
        return expected

    def _test(
        self,
        step_model: StepModel,
        geometries: list[LayerGeometry],
        expected: DenseLogits,
        routes: Routes | None = None,
    ) -> tuple[float, bool]:
        """Run the self-test. Returns the error against dense logits along the same routes, and whether rows were
        invariant. Raises ModelNotSupported if routers differ more often than near-ties explain.

        Without a self-test native kernels count as row-invariant, as they fix the order of sums; torch does not.
        """
        loaded, probe = self._loaded, self._probe
        if not expected:
            return 0.0, self._kernels is not None
        cache = KVCache(
            geometries,
            probe.num_blocks,
            self._settings.block_size,
            self._kv_dtype,
            loaded.device,
            probe.memory(self._cells, loaded.device),
        )
        with refusing(loaded.identity.architecture):
            routes = routes or self._routes
            log: ProbeLog = probe.run(step_model, cache, around=routes.following)
            far = 0.0 if self._far is None else self._far.error(step_model)
        if routes.share_changed:
            _logger.info("routers chose other experts than in a dense pass", extra={"share": routes.share_changed})
        if routes.share_changed > MOST_CHANGED:
            raise ModelNotSupported(
                loaded.model.config.model_type,
                f"in {routes.share_changed:.0%} of cases its routers choose other experts than in a dense pass",
            )
        near = log.error(lambda tokens: expected[tuple(tokens.tolist())], probe.sequences)
        return near if far <= self._most_error else far, log.row_invariant

    def _allocate(self, step_model: StepModel, geometries: list[LayerGeometry], num_spare_blocks: int) -> KVCache:
        settings, loaded = self._settings, self._loaded
        reserved = CAPTURE_BYTES if num_spare_blocks else 0  # for captured steps, which have padding rows
        sizes = affordable_states(
            self._cells,
            settings.kv_cache_memory_bytes or _CPU_KV_BYTES,
            max_batch_seqs=settings.max_batch_seqs,
            max_batch_tokens=settings.rows_of_step(loaded.device.type),
            block_size=settings.block_size,
        )
        num_blocks = settings.num_blocks or self._num_blocks_for_budget(
            step_model, geometries, reserved, sizes.num_bytes
        )
        if self._group is not None:
            num_blocks = self._group.smallest(num_blocks)  # one block table serves all ranks
        try:
            return KVCache(
                geometries,
                num_blocks + num_spare_blocks,
                settings.block_size,
                self._kv_dtype,
                loaded.device,
                StateMemory(self._cells, sizes.num_slots, sizes.num_rows, loaded.device) if self._cells else None,
            )
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            name = "num_blocks" if settings.num_blocks else "kv_cache_memory_bytes"
            raise ModelLoadError(f"{name}: {num_blocks} blocks exceed the memory of the machine; lower it") from error

    def _num_blocks_for_budget(
        self, step_model: StepModel, geometries: list[LayerGeometry], reserved_bytes: int, state_bytes: int
    ) -> int:
        settings, loaded = self._settings, self._loaded
        block_bytes = sum(g.num_elements for g in geometries) * settings.block_size * self._kv_dtype.itemsize
        budget = settings.kv_cache_memory_bytes
        if budget is None and loaded.device.type == "cuda":
            reserved_bytes += self._beside.weight_bytes(loaded.num_logits, loaded.hidden_size, loaded.dtype)
            block_bytes += self._beside.cache_bytes(settings.block_size, loaded.dtype)
            budget = affordable_kv_bytes(
                CudaMemory(loaded.device),
                step_model,
                geometries,
                num_rows=settings.rows_of_step(loaded.device.type),
                max_model_len=loaded.max_model_len,
                num_logits=loaded.num_logits,
                block_size=settings.block_size,
                dtype=self._kv_dtype,
                device=loaded.device,
                memory_fraction=settings.gpu_memory_fraction,
                reserved_bytes=reserved_bytes,
            )
        budget = (_CPU_KV_BYTES if budget is None else budget) - state_bytes
        most_useful = settings.max_batch_seqs * (-(-loaded.max_model_len // settings.block_size) + 4)
        num_blocks = min(budget // block_bytes, most_useful) if block_bytes else most_useful
        if num_blocks < 2:
            rest = f" beside {state_bytes} bytes of recurrent layers' states" if state_bytes else ""
            raise ModelLoadError(
                f"kv_cache_memory_bytes: {budget} bytes do not hold two blocks of {block_bytes} bytes{rest}; raise it"
            )
        return int(num_blocks)
