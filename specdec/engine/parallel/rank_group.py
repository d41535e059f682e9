"""The collectives of a model that is split over ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_LOAD_TIMEOUT = timedelta(hours=24)  # the servicer's load_timeout_s ends a load; this must only not come before it
_LOOPBACK = "lo"
# torch 2.11 has it under the older name only.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def device_of_rank(first_device: str, rank: int) -> torch.device:
    """The CPU for all ranks, or the GPU ``rank`` places after the first one."""
    first = torch.device(first_device)
    return first if first.type == "cpu" else torch.device(first.type, (first.index or 0) + rank)


class RankGroup:
    """This process's place among the ranks of one model, and what they compute together.

    Every method is a collective: all ranks must call it, in the same order, with the same shapes. Where a rank is
    gone or silent, gloo raises RuntimeError after ``timeout_s`` at the latest. NCCL's calls return before the work is
    done: a thread of torch ends the process some time after ``timeout_s``.
    """

    def __init__(self, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._layers = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
        self._loading = dist.new_group(backend="gloo", timeout=_LOAD_TIMEOUT)

    @classmethod
    def join(cls, rank: int, size: int, first_device: str, store: Path, timeout_s: float) -> RankGroup:
        """Meet the other ranks of this machine through a file that all of them can reach; returns when all are there.

        Sets up torch's one process group of this process, on the loopback interface unless ``GLOO_SOCKET_IFNAME`` or
        ``NCCL_SOCKET_IFNAME`` say otherwise. ``first_device`` is cpu, or the GPU of rank 0; others take those after it.
        """
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)
        device = device_of_rank(first_device, rank)
        # transformers places weights by it.
        os.environ["LOCAL_RANK"] = str(device.index if device.type == "cuda" else rank)
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=_LOAD_TIMEOUT
        )
        return cls(rank, size, device, timeout_s)

    def wait_for_all(self) -> None:
        """Return when all ranks have come here, however long loading takes them."""
        dist.monitored_barrier(self._loading, timeout=_LOAD_TIMEOUT)

    def smallest(self, value: int) -> int:
        """The least of the ranks' values."""
        values = torch.tensor([value])
        dist.all_reduce(values, dist.ReduceOp.MIN, group=self._loading)
        return int(values)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks; the argument may be overwritten.

        On CPU every element is one sum in the order of the ranks, accumulated in float32, whatever the tensor's shape:
        a row's bits do not depend on its company. (gloo's own all-reduce starts at another rank for every chunk.)
        """
        if self.device.type == "cuda":
            partial = partial.contiguous()
            dist.all_reduce(partial, group=self._layers)
            return partial
        parts = self.gather(partial)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(partial.dtype)

    def gather_columns(self, local: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Join the ranks' columns (the last dimension), in the order of the ranks.

        Each rank but the last ones has ``ceil(num_columns / size)`` of them, as torch's ``Shard`` lays them out.
        """
        width = -(-num_columns // self.size)
        if local.shape[-1] != width:
            local = torch.nn.functional.pad(local, (0, width - local.shape[-1]))
        parts = self.gather(local)
        return torch.cat(parts.unbind(0), dim=-1)[..., :num_columns]

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors ``[size, ...]``, in the order of the ranks."""
        parts = local.new_empty(self.size, *local.shape)
        _all_gather(parts.view(-1), local.contiguous().view(-1), group=self._layers)
        return parts
