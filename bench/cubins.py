"""Compiles the GPU's kernels without a GPU: registers, shared memory, spills, and which matrix instructions they take.

    python -m bench.cubins --markdown bench/results/cubins.md

The kernels that a step of each shape launches are recorded on the meta device, with their constants and types. Needs
triton, but no CUDA toolkit.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from transformers import LlamaConfig
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.launches import LaunchCounter
from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions, ForwardContext
from specdec.engine.batch import Batch
from specdec.engine.cuda.attention import TritonAttention
from specdec.engine.cuda.launch import Launch
from specdec.engine.cuda.layers import rotate_write
from specdec.engine.cuda.sampling import launch_scores, launch_top
from specdec.engine.model.device_decoder import DeviceDecoder
from specdec.engine.model.loader import random_model

ARCHITECTURES = (80, 90, 100)
_WARP = 32
_META = torch.device("meta")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
}
_PRODUCT = re.compile(r"(?:wgmma\.mma|tcgen05\.mma|mma\.sync)[\w.:]*")
_AHEAD = re.compile(r"cp\.async\.cg\.shared\.global [^;]*, 0x10,")
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    """None: `dtype`."""


SHAPES = {
    "8B": AttentionShape(32, 8, 128),
    "1B": AttentionShape(32, 8, 64),
    "0.5B": AttentionShape(14, 2, 64),
    "wide heads": AttentionShape(16, 8, 256),
    "8B, keys of 8 bits": AttentionShape(32, 8, 128, kv_dtype=torch.float8_e4m3fn),
    "8B float32": AttentionShape(32, 8, 128, torch.float32),
    "wide heads float32": AttentionShape(16, 8, 256, torch.float32),
}
PAGE_SHAPES = [name for name, shape in SHAPES.items() if shape.kv_dtype is None]
"""Shapes that every architecture takes."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resources of one kernel on one architecture."""

    kernel: str
    shape: str
    variant: str
    architecture: str
    registers: int
    spilled_bytes: int
    """Bytes of a thread's stack, for values that its registers do not hold."""
    shared_bytes: int
    num_warps: int
    code_bytes: int
    instructions: tuple[str, ...]
    """Matrix instructions, as PTX names them; a row's bits depend on the instruction."""
    copies_ahead: int
    """Asynchronous loads of 16 bytes, which a loop begins some rounds before it needs them."""


def meta_batch(num_rows: int, context_len: int, block_size: int = 16) -> Batch:
    """One sequence's rows at the end of a context, without data."""

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return Batch(
        input_ids=meta(num_rows, dtype=torch.int64),
        position_ids=meta(num_rows, dtype=torch.int64),
        slot_mapping=meta(num_rows, dtype=torch.int64),
        row_seq=meta(num_rows),
        context_lens=meta(num_rows),
        path_offsets=meta(num_rows + 1),
        path_slots=meta(num_rows),
        block_tables=meta(1, -(-context_len // block_size)),
        logits_indices=meta(num_rows, dtype=torch.int64),
        num_seqs=1,
    )


def launches_of(shape: AttentionShape) -> dict[str, list[Launch]]:
    """Launches of a step with a model of this shape, by variant."""
    heads, dim = shape.num_heads, shape.head_dim
    config = LlamaConfig(
        hidden_size=heads * dim,
        intermediate_size=4 * heads * dim,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=dim,
        vocab_size=128256,
    )
    geometry = LayerGeometry(shape.num_kv_heads, dim, dim)
    model = random_model(config, shape.dtype, _META)
    decoder = DeviceDecoder(model, [AttentionOptions(dim**-0.5)], 8192)
    cache = KVCache([geometry], 4, 16, shape.kv_dtype or shape.dtype, _META)
    found = {}
    for num_rows in (8, 512):
        with torch.inference_mode(), LaunchCounter() as counter:
            logits = decoder(meta_batch(num_rows, 4096), cache)
            numbers = torch.empty(num_rows, 5, dtype=torch.float64, device=_META)
            scores = launch_scores(logits, numbers, (True, True))
            launch_top(scores, numbers, torch.empty(num_rows, 2, dtype=torch.int32, device=_META), 4)
        found[f"{num_rows} rows"] = counter.launches
    ordered = DeviceDecoder(
        random_model(config, shape.dtype, _META), [AttentionOptions(dim**-0.5)], 8192, row_invariant=True
    )
    for num_rows in (8, 512):
        with torch.inference_mode(), LaunchCounter() as counter:
            ordered(meta_batch(num_rows, 256), cache)
        found[f"deterministic, {num_rows} rows"] = counter.launches
    sinks = torch.empty(heads, dtype=shape.dtype, device=_META)
    options = AttentionOptions(dim**-0.5, sliding_window=512, softcap=30.0, sinks=sinks)
    query, key, value = (
        torch.empty(8, number, dim, dtype=shape.dtype, device=_META)
        for number in (heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    batch, kernel = meta_batch(8, 4096), TritonAttention()
    norms, tables = (torch.empty(2, dim, dtype=shape.dtype, device=_META), torch.empty(2, 64, dim // 2, device=_META))
    qkv = torch.empty(8, (heads + 2 * shape.num_kv_heads) * dim, dtype=shape.dtype, device=_META)
    with LaunchCounter() as counter:
        kernel(query, key, value, 0, ForwardContext(batch, cache, kernel), options)
        rotate_write(qkv, heads, 0, batch, cache, (tables[0], tables[1]), norms, 1e-6)
    found["window, softcap, sinks, norms of heads"] = counter.launches
    return found


def compile_launch(launch: Launch, shape: str, variant: str, architecture: int) -> Compiled:
    """Compile one launch to a cubin and read its resources."""
    kernel = launch.kernel
    signature: dict[str, str] = {}
    aligned: dict[tuple[int], Any] = {}
    values = iter(launch.arguments)
    for index, name in enumerate(kernel.arg_names):
        if name in launch.constants:
            signature[name] = "constexpr"
            continue
        value = next(values)
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            if not kernel.params[index].do_not_specialize_on_alignment:
                aligned[(index,)] = _ALIGNED
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            is_free = kernel.params[index].do_not_specialize
            if isinstance(value, int) and value % 16 == 0 and value > 0 and not is_free:
                aligned[(index,)] = _ALIGNED
    source = ASTSource(kernel, signature, constexprs=dict(launch.constants), attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, _WARP), options=dict(launch.options))
    cubin = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if match is None:
        raise RuntimeError(f"cuobjdump reports no registers: {usage}")
    return Compiled(
        kernel=launch.name,
        shape=shape,
        variant=variant,
        architecture=f"sm_{architecture}",
        registers=int(match[1]),
        spilled_bytes=int(match[2]),
        shared_bytes=int(compiled.metadata.shared),
        num_warps=int(launch.options.get("num_warps", 4)),
        code_bytes=len(cubin),
        instructions=tuple(sorted(set(_PRODUCT.findall(compiled.asm["ptx"])))),
        copies_ahead=len(_AHEAD.findall(compiled.asm["ptx"])),
    )


def _is_same(launch: Launch, other: Launch) -> bool:
    return (launch.name, launch.constants, launch.options) == (other.name, other.constants, other.options)


def markdown(rows: list[Compiled]) -> str:
    """A page with one row per kernel: the maxima over shapes and variants on each architecture."""
    names = list(dict.fromkeys(row.kernel for row in rows))
    architectures = list(dict.fromkeys(row.architecture for row in rows))
    lines = [
        f"# GPU kernels as Triton {triton.__version__} compiles them",
        "",
        "Compiled without a GPU by `python -m bench.cubins`; nothing here has run on one. Each cell is the most that "
        f"any of the shapes {', '.join(PAGE_SHAPES)} needs: registers of a thread, spilled bytes, bytes of shared "
        "memory.",
        "",
        f"| kernel | {' | '.join(architectures)} | products by |",
        "|---" * (len(architectures) + 2) + "|",
    ]
    for name in names:
        cells = []
        for architecture in architectures:
            of_it = [row for row in rows if (row.kernel, row.architecture) == (name, architecture)]
            most = (max(row.registers for row in of_it), max(row.spilled_bytes for row in of_it))
            cells.append(f"{most[0]}, {most[1]}, {max(row.shared_bytes for row in of_it)}")
        instructions = sorted({found for row in rows if row.kernel == name for found in row.instructions})
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(instructions)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compile all launches; the exit code is 1 where a kernel spills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", type=int, nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=PAGE_SHAPES)
    parser.add_argument("--markdown", type=Path, help="file for the table")
    options = parser.parse_args()
    rows = []
    for name in options.shapes:
        done: list[Launch] = []
        for variant, launches in launches_of(SHAPES[name]).items():
            for launch in launches:
                if any(_is_same(launch, other) for other in done):
                    continue
                done.append(launch)
                for architecture in options.architectures:
                    rows.append(compile_launch(launch, name, variant, architecture))
                    print(json.dumps(asdict(rows[-1])), flush=True)
    if options.markdown:
        options.markdown.write_text(markdown(rows))
    return int(any(row.spilled_bytes for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
