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
from specdec.engine.model.kv_budget import NOTHING, Beside, allocate_cache
from specdec.engine.model.linear import TorchHeads, TorchWeight, WeightPacker, torch_path
from specdec.engine.model.loader import LoadedModel, load_model
from specdec.engine.model.mixtures.blocks import make_model_row_invariant
from specdec.engine.model.mixtures.weights import EXPERTS_VERSION, ExpertsPacker, TorchExperts, native_experts
from specdec.engine.model.proofs.judge import Judge
from specdec.engine.model.proofs.rehearsal import rehearse
from specdec.engine.model.ragged import RaggedModel, StepModel
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

_INSTALL_KERNELS = "install specdec from a wheel for this machine, or a C++ compiler (Debian: apt-get install g++)"
_logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A step model that has passed the self-test; fields as in ``BuiltModel``."""

    step_model: StepModel
    kernel_path: str
    row_invariant: bool


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
        self._is_exact = not is_on_gpu(loaded.device) and loaded.dtype == torch.float32
        if settings.deterministic and not self._is_exact and not is_on_gpu(loaded.device):
            raise ModelLoadError("deterministic: needs dtype float32 on a CPU, or a GPU")
        self._no_kernels = ""  # why there are none, and the remedy
        self._kernels = self._make_kernels() if self._is_exact else None
        self._has_device_kernels = False
        self._judge = Judge(loaded, settings, has_native_kernels=self._kernels is not None)

    @torch.inference_mode()
    def build(self) -> BuiltModel:
        """Run all stages."""
        settings, loaded = self._settings, self._loaded
        if loaded.device.type == "cpu":
            torch.set_num_threads(1 if self._is_exact else settings.num_threads)
        if self._group is not None:
            self._group.wait_for_all()  # later waits between ranks are short
        self._has_device_kernels = is_on_gpu(loaded.device) and self._find_device_kernels()
        self._judge.compute_dense()
        if self._group is not None:
            shard_model(loaded.model, self._group)  # the dense logits came from transformers' own wrappers
        ragged = RaggedModel(loaded.model, TiledAttention())
        recorded = self._judge.record_attention(ragged)
        if is_on_gpu(loaded.device):
            ragged.kernel = device_attention(recorded.geometries, has_kernels=self._has_device_kernels)
        chosen = self._choose_model(ragged, recorded)
        step_model = chosen.step_model
        is_gathered = isinstance(step_model, RaggedModel) and isinstance(step_model.kernel, GatherAttention)
        has_spare = is_on_gpu(loaded.device) and not is_gathered  # block for padding rows
        cache = allocate_cache(
            settings,
            loaded,
            step_model,
            recorded.geometries,
            self._judge.cells,
            self._kv_dtype,
            num_spare_blocks=int(has_spare),
            beside=self._beside,
            group=self._group,
        )
        return BuiltModel(
            loaded,
            step_model,
            chosen.kernel_path,
            chosen.row_invariant,
            cache,
            num_spare_blocks=int(has_spare),
            replays=with_replays(step_model, cache, loaded.max_model_len, is_alone=self._group is None)
            if has_spare
            else None,
            kernels=self._kernels,
            has_device_kernels=self._has_device_kernels,
        )

    def _choose_model(self, ragged: RaggedModel, recorded: RecordingKernel) -> _Chosen:
        """The fastest step model that passes the self-test."""
        if self._has_device_kernels and self._settings.fused == "auto":
            chosen, ragged = self._try_device_decoder(ragged, recorded)
            if chosen is not None:
                return chosen
        if self._settings.weight_quantization == "fp8":
            why = self._no_kernels or f"{self._loaded.identity.architecture} has not Llama's shape"
            raise ModelLoadError(f"weight_quantization: fp8 needs the GPU's own decoder: {why}")
        chosen, ragged = self._try_fused_decoder(ragged, recorded)
        return chosen or self._test_modules(ragged, recorded)

    def _try_device_decoder(self, ragged: RaggedModel, recorded: RecordingKernel) -> tuple[_Chosen | None, RaggedModel]:
        """The GPU's own decoder if the model has its shape and it passes, and else the model to go on with."""
        loaded, is_ordered = self._loaded, bool(self._settings.deterministic)
        is_fp8 = self._settings.weight_quantization == "fp8"
        decoder = device_decoder(
            loaded.model, recorded, loaded.max_model_len, row_invariant=is_ordered, is_fp8=is_fp8, group=self._group
        )
        if decoder is None:
            return None, ragged
        error, row_invariant = self._tried(decoder, recorded.geometries)
        if not is_ordered:
            row_invariant = False  # torch's products depend on the batch
        elif not self._settings.self_test:
            row_invariant = True
        if self._agreed(error <= self._judge.most_error and row_invariant == is_ordered):
            loaded.release_model()
            path = triton_path("ordered-decoder" if is_ordered else "decoder", loaded.device)
            return _Chosen(decoder, path, row_invariant), ragged
        if is_fp8:
            raise ModelLoadError(f"weight_quantization: fp8 changes the logits by {error:.2g} of their spread")
        _logger.error(
            "the GPU's decoder failed its self-test and is not used",
            extra={"logit_error": error, "row_invariant": row_invariant},
        )
        return None, self._loaded_again(ragged)

    def _try_fused_decoder(self, ragged: RaggedModel, recorded: RecordingKernel) -> tuple[_Chosen | None, RaggedModel]:
        """The CPU's fused decoder if the model has its shape and it passes, and else the model to go on with."""
        kernels, loaded = self._kernels, self._loaded
        is_possible = self._settings.fused == "auto" and self._group is None  # it has no collectives
        if kernels is None or not is_possible or self._kv_dtype != loaded.dtype:
            return None, ragged
        if not is_fusable(
            loaded.model, recorded.geometries, recorded.options, kernels.max_head_dim, takes_mixtures=True
        ):
            return None, ragged
        fused = FusedDecoder(loaded.model, kernels, recorded.geometries, recorded.options, loaded.max_model_len)
        error, row_invariant = self._judge.test(fused, recorded.geometries)
        if error <= self._judge.most_error and row_invariant:
            loaded.release_model()
            path = f"fused-{KERNEL_VERSION}-{kernels.variant}"
            return _Chosen(fused, f"{path}-experts-{EXPERTS_VERSION}" if fused.has_mixtures else path, True), ragged
        _logger.error("the fused decoder failed its self-test and is not used", extra={"logit_error": error})
        return None, self._loaded_again(ragged)

    def _loaded_again(self, ragged: RaggedModel) -> RaggedModel:
        """The model read again, as building a decoder packs its weights."""
        loaded = self._loaded
        loaded.model = ragged.model = load_model(self._settings, self._group).model
        if self._group is not None:
            shard_model(loaded.model, self._group)
        return RaggedModel(loaded.model, ragged.kernel, ragged.mask_windows)

    def _test_modules(self, ragged: RaggedModel, recorded: RecordingKernel) -> _Chosen:
        """transformers' modules with our attention. Raises ModelLoadError or ModelNotSupported if they do not pass."""
        loaded = self._loaded
        kernel_path = self._install_kernels(ragged)
        error, row_invariant = self._tried(ragged, recorded.geometries)
        if self._has_device_kernels and not error < math.inf:
            ragged.kernel = GatherAttention()
            kernel_path = self._install_kernels(ragged)
            error, row_invariant = self._judge.test(ragged, recorded.geometries)
        if not error <= self._judge.most_error:
            if self._kv_dtype != loaded.dtype and math.isfinite(error):
                raise ModelLoadError(f"kv_cache_dtype: fp8 changes the logits by {error:.2g} of their spread; set auto")
            raise ModelNotSupported(
                loaded.model.config.model_type,
                f"paged logits differ from dense ones by {error:.2g} of their spread: its attention depends on more "
                "than keys and values",
            )
        row_invariant = row_invariant and self._is_exact
        self._tell_missing_kernels(row_invariant)
        return _Chosen(ragged, kernel_path, row_invariant)

    def _tell_missing_kernels(self, row_invariant: bool) -> None:
        """Warn if there are no kernels. Raises ModelLoadError if row invariance is demanded and not given."""
        has_gpu = is_on_gpu(self._loaded.device)
        if self._no_kernels:
            if not self._settings.self_test:
                self._no_kernels += " (and self_test is off, which would test torch's row invariance)"
            promise = "holds" if row_invariant else "is not given"
            note = "steps are several times slower" if has_gpu else f"row invariance {promise}"
            _logger.warning(f"no native kernels, {note}: {self._no_kernels}")
        if self._settings.deterministic and not row_invariant:
            why = "a row's logits depend on the rest of the batch"
            if has_gpu:
                why = "row-invariant GPU kernels exist only for models of Llama's shape"
            name = self._loaded.identity.name
            raise ModelLoadError(f"deterministic: {name} is not row-invariant here: {self._no_kernels or why}")

    def _tried(self, step_model: StepModel, geometries: list[LayerGeometry]) -> tuple[float, bool]:
        """`Judge.test`; the error is infinite where Triton cannot compile a kernel for this GPU. With ranks, raises."""
        try:
            return self._judge.test(step_model, geometries)
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
