"""Installs the fake device in torch.cuda and Triton's interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import shutil
import subprocess
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from tests.support.fake_cuda.device import DeviceTensor, FakeDevice
from tests.support.fake_cuda.streams import Event, Graph, Stream


@contextlib.contextmanager
def fake_cuda() -> Iterator[FakeDevice]:
    """A fake GPU within the context; its queued operations run at the end."""
    _load_guard()
    device = FakeDevice()
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes a GPU's tensors on the CPU and copies them
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter's Python type depends on its device
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the device is one thread's
            _install(device, patch)
            with device:
                yield device
            device.default.run()
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


@functools.cache
def _load_guard() -> None:
    """Compile and load guard.cpp once. Skips the test without a C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "guard.so")
        source = str(Path(__file__).with_name("guard.cpp"))
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
        subprocess.run([compiler, *options, source, "-o", library, "-lc10"], check=True)
        ctypes.CDLL(library)


def _install(device: FakeDevice, patch: pytest.MonkeyPatch) -> None:
    def made_graph(keep_graph: bool = False) -> Graph:
        graph = Graph(keep_graph)
        graph.current = lambda: device.current
        return graph

    class WaitedEvent(Event):
        def synchronize(self) -> None:
            device.num_waits += 1
            self.run()

    @contextlib.contextmanager
    def captured(graph: Graph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
        device.wait()
        if pool in refused:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        stream = stream or Stream()
        outer = device.current
        device.current, stream.capturing = stream, graph
        try:
            yield
        finally:
            stream.capturing = None
            if graph.is_lost:  # torch raises before it restores the stream and ends the allocation
                stuck.append(pool)
                refused.append(pool)
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            graph.spoil()
            pools[pool].append((weakref.ref(graph), graph.num_bytes))
            device.current = outer

    def empty_cache() -> None:
        if stuck:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def end_allocation(index: int, pool: Any) -> None:
        if pool not in stuck:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        stuck.remove(pool)

    def reserved(index: Any = None) -> int:
        """Bytes of graphs and of those that are gone, as long as one of their pool is there."""
        alive = [held for held in pools.values() if any(graph() is not None for graph, _ in held)]
        return sum(num_bytes for held in alive for _, num_bytes in held)

    pools: dict[Any, list[tuple[weakref.ref[Graph], int]]] = defaultdict(list)
    stuck: list[Any] = []  # pools of failed captures
    refused: list[Any] = []  # which the allocator of host memory would go on recording to
    numbers = itertools.count(1)
    patch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocation)
    patch.setattr(torch._C, "_cuda_releasePool", lambda index, pool: None)
    for name, value in {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda index: None,
        "current_device": lambda: 0,
        "get_device_name": lambda index=None: "NVIDIA Fake",
        "get_device_capability": lambda index=None: (9, 0),
        "synchronize": lambda index=None: device.wait(),
        "empty_cache": empty_cache,
        "memory_reserved": reserved,
        "memory_allocated": lambda index=None: 0,
        "max_memory_allocated": lambda index=None: 0,
        "reset_peak_memory_stats": lambda index=None: None,
        "mem_get_info": lambda index=None: (78 << 30, 80 << 30),
        "current_stream": lambda index=None: device.current,
        "set_stream": lambda stream: setattr(device, "current", stream),
        "get_rng_state": lambda index=None: torch.get_rng_state(),  # the device's numbers come from the CPU's generator
        "set_rng_state": lambda state, index=None: torch.set_rng_state(state),
        "set_sync_debug_mode": lambda mode: setattr(device, "refuses_waits", mode == "error"),
        "stream": device.on,
        "graph_pool_handle": lambda: (0, next(numbers)),
        "Stream": Stream,
        "Event": WaitedEvent,
        "CUDAGraph": made_graph,
        "graph": captured,
    }.items():
        patch.setattr(torch.cuda, name, value)
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *arguments: Any, **constants: Any) -> None:
        if not any(isinstance(each, DeviceTensor) for each in arguments):
            launch(self, *arguments, **constants)
            return
        device.put_launch(self.fn.__name__, lambda *backings: launch(self, *backings, **constants), arguments)

    patch.setattr(interpreter.GridExecutor, "__call__", launched)
