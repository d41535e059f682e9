"""Chooses a model's device and data type, and what runs it on a GPU: Triton kernels if they fit its shape, or torch.

Triton is imported on use, as machines without a GPU lack it.
"""

from collections.abc import Sequence
from subprocess import SubprocessError

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionKernel, RecordingKernel
from specdec.engine.attention.torch_kernels import GatherAttention
from specdec.engine.cuda.buckets import BucketedSteps
from specdec.engine.cuda.passes import CudaCapture
from specdec.engine.errors import ModelLoadError, is_out_of_memory
from specdec.engine.model.fused import is_fusable
from specdec.engine.model.ragged import StepModel
from specdec.engine.parallel.rank_group import RankGroup
from specdec.engine.settings import EngineSettings

_LEAST_FP8 = (8, 9)
_MAX_HEAD_DIM = 256  # wider heads do not fit into the registers and the shared memory of a multiprocessor
_MOST_REASON = 300  # characters of another library's error
_KERNELS_VERSION = 5  # raise it with every change of a kernel that may change a bit


def choose_device(name: str) -> torch.device:
    """The device that a setting names. Raises ModelLoadError if torch does not see it."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelLoadError(f"device: {name}, but torch sees no CUDA device: {_why_no_cuda()}")
    return torch.device("cuda:0" if name == "cuda" else name)


def check_quantization(settings: EngineSettings, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ModelLoadError, which names the setting, where weights or keys and values cannot have few bits."""
    name, place = settings.weight_quantization, f"{str(dtype).removeprefix('torch.')} on {device.type}"
    if settings.kv_cache_dtype == "fp8":
        _check_fp8("kv_cache_dtype", device)
    if name in ("int8", "int4") and (device.type, dtype) != ("cpu", torch.float32):
        raise ModelLoadError(f"weight_quantization: {name} needs float32 on the CPU, not {place}")
    if name != "fp8":
        return
    if device.type != "cuda" or dtype == torch.float32:
        raise ModelLoadError(f"weight_quantization: fp8 needs bfloat16 or float16 on a GPU, not {place}")
    _check_fp8("weight_quantization", device)


def _check_fp8(name: str, device: torch.device) -> None:
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _LEAST_FP8:
        needed, there = (".".join(map(str, each)) for each in (_LEAST_FP8, capability))
        raise ModelLoadError(f"{name}: fp8 needs a GPU of compute capability {needed}, this has {there}")


def _why_no_cuda() -> str:
    built_for = torch.version.cuda
    if built_for is None:
        return f"torch {torch.__version__} is built without CUDA (pip install torch from download.pytorch.org/whl)"
    return f"torch {torch.__version__} needs a driver for CUDA {built_for.split('.')[0]}; nvidia-smi names the driver's"


def choose_dtype(name: str, device: torch.device, config: PreTrainedConfig) -> torch.dtype:
    """The data type that a setting names; by default float32 on a CPU, and the checkpoint's own on a GPU."""
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    if device.type == "cpu":
        return torch.float32
    own = getattr(config, "dtype", None)
    return own if own in (torch.float32, torch.bfloat16, torch.float16) else torch.bfloat16


def is_on_gpu(device: torch.device) -> bool:
    """Whether Triton kernels run on the device."""
    return device.type == "cuda"


def missing_kernels(device: torch.device) -> str:
    """Why Triton's kernels cannot run on the device, and the remedy; "" if they can, or if it is no GPU.

    Cost: a small kernel is compiled, unless Triton's cache has it.
    """
    if not is_on_gpu(device):
        return ""
    try:
        from specdec.engine.cuda.layers import add_norm

        row = torch.zeros(1, 2, device=device)
        add_norm(row, row[0], row, row, 1.0)
        torch.cuda.synchronize(device)
    except ImportError as error:
        return f"triton cannot be imported ({error}): pip install triton"
    except Exception as error:  # of Triton, its compilers and the driver
        if is_out_of_memory(error):
            raise
        return f"{_first_line(error)}: Triton needs a C compiler and Python's headers (Debian: gcc python3-dev)"
    return ""


def is_kernels_fault(error: Exception) -> bool:
    """Whether Triton could not compile a kernel for this GPU, or the GPU has too few resources for it."""
    is_tritons = any(kind.__name__ == "TritonError" for kind in type(error).__mro__)
    return is_tritons or isinstance(error, SubprocessError) or "PassManager::run failed" in str(error)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_MOST_REASON]


def device_attention(geometries: Sequence[LayerGeometry], *, has_kernels: bool = True) -> AttentionKernel:
    """Attention for models that transformers runs on a GPU; without Triton's kernels, torch's operations."""
    if not has_kernels or any(max(geometry.key_dim, geometry.value_dim) > _MAX_HEAD_DIM for geometry in geometries):
        return GatherAttention()
    from specdec.engine.cuda.attention import TritonAttention

    return TritonAttention()


def device_decoder(
    model: PreTrainedModel,
    recorded: RecordingKernel,
    max_model_len: int,
    *,
    row_invariant: bool,
    is_fp8: bool,
    group: RankGroup | None,
) -> StepModel | None:
    """The decoder in Triton kernels, which takes the model's weights; None for a model of another shape.

    ``row_invariant``: its products are row-invariant Triton kernels, too. ``is_fp8``: its weights take 8 bits.
    ``group``: the model's ranks.
    """
    if not is_fusable(model, recorded.geometries, recorded.options, _MAX_HEAD_DIM):
        return None
    from specdec.engine.model.device_decoder import DeviceDecoder

    return DeviceDecoder(
        model,
        recorded.options,
        max_model_len,
        row_invariant=row_invariant,
        is_fp8=is_fp8,
        group=group,
    )


def with_replays(step_model: StepModel, cache: KVCache, max_len: int, *, is_alone: bool) -> BucketedSteps | None:
    """The model with small steps as CUDA graphs, which use the cache's last block; None on a CPU. ``max_len``: most
    tokens of a sequence; ``is_alone``: the model has no other ranks."""
    if cache.device.type != "cuda":
        return None
    return BucketedSteps(step_model, cache, CudaCapture(is_alone=is_alone), max_len)


def triton_path(part: str, device: torch.device) -> str:
    """The numerics id of Triton kernels: part, versions of kernels and compilers, and device."""
    import triton

    versions = [part, str(_KERNELS_VERSION), triton.__version__]
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        tools = triton.knobs.nvidia
        ptxas = tools.ptxas_blackwell if major >= 10 else tools.ptxas
        versions += [f"ptxas{ptxas.version}", f"cuda{torch.version.cuda}", f"sm{major}{minor}"]
    return "-".join(["triton", *versions])
