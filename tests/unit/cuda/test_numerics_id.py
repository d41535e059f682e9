"""What names a GPU's bits: all that changes them is in the numerics id, as two replicas of one id are to agree."""

import ast
import hashlib
import inspect
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton

from specdec.engine.attention.kv_cache import LayerGeometry
from specdec.engine.cuda import attention_kernels, layers, products
from specdec.engine.cuda.attention import launch_shape
from specdec.engine.cuda.products import product_tiles
from specdec.engine.model import device_choice
from specdec.engine.model.device_choice import triton_path

CUDA = torch.device("cuda:0")
DIGESTS = {5: "768956ce5d2b51a3"}
"""Of the kernels and their tiles, by the version that the numerics id has for them."""


def code_of(module: ModuleType) -> str:
    """A module's kernels and their constants, without comments and docstrings."""
    found = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef):
            node.body = node.body[ast.get_docstring(node) is not None :]
            found += [ast.unparse(node)] if node.decorator_list else []
        elif isinstance(node, ast.Assign):
            found.append(ast.unparse(node))
    return "\n".join(found)


def digest_of_kernels() -> str:
    dtypes = (torch.float32, torch.bfloat16)
    parts = [code_of(module) for module in (attention_kernels, layers, products)]
    parts += [
        repr(launch_shape(16, LayerGeometry(heads, dim, dim), dtype))
        for heads in (1, 4, 16)
        for dim in (64, 80, 128, 256)
        for dtype in dtypes
    ]
    parts += [str(product_tiles(1, 4096, dtype).block_k) for dtype in dtypes]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def test_kernels_that_may_round_otherwise_have_another_version() -> None:
    version = device_choice._KERNELS_VERSION
    assert DIGESTS.get(version) == digest_of_kernels(), (
        "where a bit may have changed raise _KERNELS_VERSION, and in any case put the digest here"
    )


def test_the_id_names_whatever_compiles_the_kernels_and_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = {"ptxas": SimpleNamespace(version="12.9"), "ptxas_blackwell": SimpleNamespace(version="13.1")}
    monkeypatch.setattr(triton.knobs, "nvidia", SimpleNamespace(**tools))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    first = triton_path("ordered-decoder", CUDA)
    assert first == f"triton-ordered-decoder-5-{triton.__version__}-ptxas12.9-cuda13.0-sm90"
    found = {first, triton_path("decoder", CUDA)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    found.add(blackwell := triton_path("ordered-decoder", CUDA))
    assert "ptxas13.1" in blackwell
    monkeypatch.setattr(torch.version, "cuda", "13.1")
    found.add(triton_path("ordered-decoder", CUDA))
    monkeypatch.setattr(triton, "__version__", "9.9")
    found.add(triton_path("ordered-decoder", CUDA))
    monkeypatch.setattr(device_choice, "_KERNELS_VERSION", 6)
    found.add(triton_path("ordered-decoder", CUDA))
    assert len(found) == 6
