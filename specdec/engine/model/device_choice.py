"""Chooses what runs a model on a GPU: Triton kernels for models of their shape, torch for others.

Triton is imported on use, as machines without a GPU lack it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionKernel, RecordingKernel
from specdec.engine.attention.torch_kernels import GatherAttention
from specdec.engine.batch import Batch
from specdec.engine.model.fused import is_fusable
from specdec.engine.model.ragged import StepModel
from specdec.engine.parallel.rank_group import RankGroup

_MAX_HEAD_DIM = 256  # of specdec.engine.cuda.attention
_KERNELS_VERSION = 2  # raise it with every change of a kernel that may change a bit


def is_on_gpu(device: torch.device) -> bool:
    """Whether Triton kernels run on the device."""
    return device.type == "cuda"


def device_attention(geometries: Sequence[LayerGeometry]) -> AttentionKernel:
    """Attention for models that transformers runs on a GPU."""
    if any(max(geometry.key_dim, geometry.value_dim) > _MAX_HEAD_DIM for geometry in geometries):
        return GatherAttention()
    from specdec.engine.cuda.attention import TritonAttention

    return TritonAttention()


def device_decoder(
    model: PreTrainedModel,
    recorded: RecordingKernel,
    max_model_len: int,
    *,
    row_invariant: bool,
    group: RankGroup | None,
) -> StepModel | None:
    """The decoder in Triton kernels, which takes the model's weights; None for a model of another shape.

    ``row_invariant``: its products are row-invariant Triton kernels, too. ``group``: the model's ranks.
    """
    if not is_fusable(model, recorded.geometries, recorded.options, _MAX_HEAD_DIM):
        return None
    from specdec.engine.model.device_decoder import DeviceDecoder

    return DeviceDecoder(
        model, recorded.geometries, recorded.options, max_model_len, row_invariant=row_invariant, group=group
    )


class ReplayingModel(StepModel, Protocol):
    """A step model that replays captured steps."""

    @property
    def row_edges(self) -> tuple[int, ...]:
        """Numbers of rows to which steps are padded, ascending; a larger step is not replayed. Empty: no replays."""

    @property
    def forward(self) -> Callable[[Batch, KVCache], torch.Tensor]:
        """Runs a step without a replay."""

    @property
    def capture(self) -> Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]:
        """Captures a function in the graphs' shared memory. Returns its replay and its result."""

    def stop(self) -> None:
        """Stop replaying."""

    def prepare(self, max_len: int, *, tap_ids: tuple[int, ...] = (), is_limited: bool = True) -> None:
        """Capture steps of sequences up to `max_len` tokens, with a tap of `tap_ids`. `is_limited`: within bounds of
        time and memory.
        """

    def has_room(self, more_s: float) -> bool:
        """Whether more may be captured before the first request, after ``more_s`` seconds beyond ``prepare``."""


def with_replays(step_model: StepModel, cache: KVCache) -> ReplayingModel | None:
    """The model with small steps as CUDA graphs, which use the cache's last block; None on a CPU."""
    if cache.device.type != "cuda":
        return None
    from specdec.engine.cuda.buckets import BucketedSteps
    from specdec.engine.cuda.passes import CudaCapture

    steps = BucketedSteps(step_model, CudaCapture())
    steps.serve(cache)
    return steps


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
