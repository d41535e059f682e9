"""The C++ kernels against torch, and the build that makes them."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions, ForwardContext
from specdec.engine.attention.torch_kernels import GatherAttention, TiledAttention
from specdec.engine.batch import Batch
from specdec.engine.model.linear import OneDnnWeight
from specdec.engine.native import build
from specdec.engine.native.kernels import NativeAttention, NativeKernels

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def teams() -> list[NativeKernels]:
    """Kernels with 1 to 4 threads."""
    return [NativeKernels(num_threads) for num_threads in (1, 2, 3, 4)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_outputs", "depth"), [(1, 1), (33, 7), (64, 64), (131, 100), (640, 384)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_product_is_the_linear_layer(
    teams: list[NativeKernels], num_outputs: int, depth: int, has_bias: bool
) -> None:
    weight, bias = random(num_outputs, depth), random(num_outputs, seed=1) if has_bias else None
    packed = teams[1].pack(weight, bias)
    for num_rows in (0, 1, 2, 5, 12, 13, 40):
        rows = random(num_rows, depth, seed=2)
        expected = torch.nn.functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(packed(rows).double(), expected, rtol=1e-5, atol=1e-4)


def test_packed_product_of_a_row_has_the_same_bits_for_any_rows_and_threads(
    teams: list[NativeKernels],
) -> None:
    weight, bias, rows = random(331, 200), random(331, seed=1), random(67, 200, seed=2)
    packs = [kernels.pack(weight, bias) for kernels in teams] + [OneDnnWeight(weight, bias, 2)]
    for pack, same in ((packs[:4], packs[0](rows)), (packs[4:], packs[4](rows))):
        for packed, count in itertools.product(pack, range(1, 67)):
            assert torch.equal(packed(rows[:count]), same[:count]), count
            assert torch.equal(packed(rows[67 - count :]), same[67 - count :]), count


class Paged:
    """Two sequences in scattered blocks, and rows that read them: plain rows, and nodes of a tree."""

    def __init__(self, geometry: LayerGeometry, num_heads: int, lengths: tuple[int, int] = (45, 18)) -> None:
        self.geometry = geometry
        self.num_blocks = 24
        shuffled = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(3)).int()
        tables = shuffled.view(2, -1)
        positions, seqs, contexts, slots = [], [], [], []
        offsets: list[int] = [0]
        paths: list[int] = []

        def slot(seq: int, logical: int) -> int:
            return int(tables[seq, logical // BLOCK_SIZE]) * BLOCK_SIZE + logical % BLOCK_SIZE

        for seq, length in enumerate(lengths):
            for position in range(length):
                positions.append(position)
                contexts.append(position + 1)
                slots.append(slot(seq, position))
                seqs.append(seq)
                offsets.append(len(paths))
            # a fork of depth 2: nodes 0 and 1 below the last token, 2 below 1
            for node, ancestors in enumerate(([0], [1], [1, 2])):
                positions.append(length - 1 + len(ancestors))
                contexts.append(length)
                slots.append(slot(seq, length + node))
                seqs.append(seq)
                paths += [slot(seq, length + ancestor) for ancestor in ancestors]
                offsets.append(len(paths))
        num_rows = len(positions)
        int32 = torch.int32
        self.batch = Batch(
            input_ids=torch.zeros(num_rows, dtype=torch.int64),
            position_ids=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            row_seq=torch.tensor(seqs, dtype=int32),
            context_lens=torch.tensor(contexts, dtype=int32),
            path_offsets=torch.tensor(offsets, dtype=int32),
            path_slots=torch.tensor(paths, dtype=int32),
            block_tables=tables,
            logits_indices=torch.zeros(0, dtype=torch.int64),
            num_seqs=2,
        )
        self.query = random(num_rows, num_heads, geometry.key_dim, seed=4)
        self.key = random(num_rows, geometry.num_kv_heads, geometry.key_dim, seed=5)
        self.value = random(num_rows, geometry.num_kv_heads, geometry.value_dim, seed=6)

    def run(self, kernel: object, options: AttentionOptions) -> torch.Tensor:
        cache = KVCache([self.geometry], self.num_blocks, BLOCK_SIZE, torch.float32, torch.device("cpu"))
        context = ForwardContext(self.batch, cache, kernel)  # type: ignore[arg-type]
        # Heads outside rows, as transformers gives them: strided, not contiguous.
        query, key, value = (
            rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in (self.query, self.key, self.value)
        )
        return context.kernel(query, key, value, 0, context, options)


OPTIONS = {
    "plain": AttentionOptions(0.3),
    "window": AttentionOptions(0.3, sliding_window=5),
    "window of a tile": AttentionOptions(0.3, sliding_window=16),
    "softcap": AttentionOptions(0.3, softcap=2.0),
    "sinks": AttentionOptions(0.3, sinks=torch.linspace(-2, 2, 6)),
}
GEOMETRIES = [(2, 64, 64), (6, 32, 32), (1, 128, 128), (2, 24, 24), (3, 40, 16), (2, 5, 3)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_attention_is_that_of_torch(
    teams: list[NativeKernels], geometry: tuple[int, int, int], options: AttentionOptions
) -> None:
    paged = Paged(LayerGeometry(*geometry), num_heads=6)
    expected = paged.run(TiledAttention(), options)
    results = [paged.run(NativeAttention(kernels), options) for kernels in teams]
    torch.testing.assert_close(results[0], expected, rtol=2e-5, atol=2e-5)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gathering_attention_of_other_devices_is_the_same(options: AttentionOptions) -> None:
    paged = Paged(LayerGeometry(2, 24, 24), num_heads=6)
    expected = paged.run(TiledAttention(), options)
    torch.testing.assert_close(paged.run(GatherAttention(), options), expected, rtol=2e-5, atol=2e-5)


def test_attention_survives_scores_at_the_ends_of_the_range(teams: list[NativeKernels]) -> None:
    paged = Paged(LayerGeometry(2, 64, 64), num_heads=6)
    paged.query *= 100
    result = paged.run(NativeAttention(teams[0]), AttentionOptions(1.0))
    torch.testing.assert_close(result, paged.run(TiledAttention(), AttentionOptions(1.0)), rtol=1e-3, atol=1e-3)


def test_a_second_build_takes_the_first_ones_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_NATIVE_CACHE", str(tmp_path))
    first = build.build_library()
    built_at = first.stat().st_mtime_ns
    assert build.build_library() == first
    assert first.stat().st_mtime_ns == built_at
    assert first.is_relative_to(tmp_path)


def test_build_key_follows_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = build.build_key("c++")
    monkeypatch.setattr(build, "cpu_features", lambda: "another cpu")
    assert build.build_key("c++") != here


def test_a_failing_compiler_is_a_typed_error_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SPECDEC_NATIVE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(build.NativeUnavailable, match="no such flag"):
        build.build_library()


def test_no_compiler_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.NativeUnavailable, match="no C\\+\\+ compiler"):
        build.build_library()


def test_idle_threads_use_no_processor() -> None:
    """A team that has nothing to do sleeps: its process uses no CPU time worth the name."""
    script = """
import time, torch
from specdec.engine.native.kernels import NativeKernels
kernels = NativeKernels(4)
packed = kernels.pack(torch.ones(256, 256), None)
packed(torch.ones(8, 256))

def used_while_idle():
    start = time.process_time()
    time.sleep(0.1)
    return time.process_time() - start

# On a busy machine it may take a while until every thread has had the processor on which to find that it is idle.
print(min(used_while_idle() for _ in range(8)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.01
