"""The collectives of a model that is split over ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

_LOAD_TIMEOUT = timedelta(hours=24)  # longer than the servicer's load_timeout_s, which ends a load
_LOOPBACK = "lo"
# torch 2.11 only has the older name.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def device_of_rank(first_device: str, rank: int) -> torch.device:
    """Device of a machine's rank, the first being 0: the CPU, or the GPU with the first one's index plus ``rank``."""
    first = torch.device(first_device)
    return first if first.type == "cpu" else torch.device(first.type, (first.index or 0) + rank)


def local_store(file: Path, size: int) -> Store:
    """Meeting place of ranks that can all open one file, which must be new."""
    return FileStore(str(file), size)


def leaders_store() -> TCPStore:
    """Meeting place of ranks on several machines, kept by rank 0 at a free port. Whoever reaches it may change it."""
    return TCPStore("localhost", 0, None, is_master=True, timeout=_LOAD_TIMEOUT, wait_for_workers=False)


def others_store(host: str, port: int) -> Store:
    """The leader's meeting place, for the other ranks."""
    return TCPStore(host, port, None, is_master=False, timeout=_LOAD_TIMEOUT, wait_for_workers=False)


class RankGroup:
    """This process's rank of a model, and the ranks' collectives.

    Every method is a collective: all ranks must call it in the same order with the same shapes. If a rank is gone or
    silent, gloo raises RuntimeError after at most ``timeout_s``. NCCL's calls return before the work is done; some time
    after ``timeout_s`` a thread of torch ends the process.
    """

    def __init__(self, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._layers = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
        self._loading = dist.new_group(backend="gloo", timeout=_LOAD_TIMEOUT)

    @classmethod
    def join(
        cls, rank: int, size: int, device: torch.device, store: Store, timeout_s: float, interface: str = _LOOPBACK
    ) -> RankGroup:
        """Meet the other ranks at ``store``; returns when all have joined.

        Initialises torch's default process group, on the network interface unless ``GLOO_SOCKET_IFNAME`` or
        ``NCCL_SOCKET_IFNAME`` is set.
        """
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        # transformers reads it to place weights.
        os.environ["LOCAL_RANK"] = str(device.index if device.type == "cuda" else rank)
        backend = "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_LOAD_TIMEOUT)
        return cls(rank, size, device, timeout_s)

    def wait_for_all(self) -> None:
        """Wait until all ranks arrive, for as long as they load."""
        dist.monitored_barrier(self._loading, timeout=_LOAD_TIMEOUT)

    def smallest(self, value: int) -> int:
        """The minimum of the ranks' values."""
        values = torch.tensor([value])
        dist.all_reduce(values, dist.ReduceOp.MIN, group=self._loading)
        return int(values)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the ranks; the argument may be overwritten.

        On a CPU every element is one float32 sum in rank order for any shape, so that a row's bits do not depend on the
        batch. (gloo's own all-reduce starts each chunk at another rank.)
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
        """Join the ranks' columns (the last dimension), in rank order.

        All but the last ranks have ``ceil(num_columns / size)`` columns, as in torch's ``Shard``.
        """
        width = -(-num_columns // self.size)
        if local.shape[-1] != width:
            local = torch.nn.functional.pad(local, (0, width - local.shape[-1]))
        parts = self.gather(local)
        return torch.cat(parts.unbind(0), dim=-1)[..., :num_columns]

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors ``[size, ...]``, in rank order."""
        parts = local.new_empty(self.size, *local.shape)
        _all_gather(parts.view(-1), local.contiguous().view(-1), group=self._layers)
        return parts
