"""The C++ kernels against torch."""

import itertools
import subprocess
import sys

import pytest
import torch

from specdec.engine.attention.kv_cache import LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.attention.torch_kernels import TiledAttention
from specdec.engine.native.kernels import NativeAttention, NativeKernels
from tests.support.engine.paged_attention import GEOMETRIES, OPTIONS, Paged, random_rows
from tests.support.for_each import for_each


@pytest.fixture(scope="module")
def teams() -> list[NativeKernels]:
    """Kernels with 1 to 4 threads."""
    return [NativeKernels(num_threads) for num_threads in (1, 2, 3, 4)]


@pytest.mark.parametrize(("num_outputs", "depth"), [(1, 1), (33, 7), (64, 64), (131, 100), (640, 384)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_product_is_the_linear_layer(
    teams: list[NativeKernels], num_outputs: int, depth: int, has_bias: bool
) -> None:
    weight, bias = random_rows(num_outputs, depth), random_rows(num_outputs, seed=1) if has_bias else None
    packed = teams[1].pack(weight, bias)
    for num_rows in (0, 1, 2, 5, 12, 13, 40):
        rows = random_rows(num_rows, depth, seed=2)
        expected = torch.nn.functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(packed(rows).double(), expected, rtol=1e-5, atol=1e-4)


def test_packed_product_of_a_row_has_the_same_bits_for_any_rows_and_threads(
    teams: list[NativeKernels],
) -> None:
    weight, bias, rows = random_rows(331, 200), random_rows(331, seed=1), random_rows(67, 200, seed=2)
    packs = [kernels.pack(weight, bias) for kernels in teams]
    same = packs[0](rows)
    for packed, count in itertools.product(packs, range(1, 67)):
        assert torch.equal(packed(rows[:count]), same[:count]), count
        assert torch.equal(packed(rows[67 - count :]), same[67 - count :]), count


@for_each("options", OPTIONS.values())
@for_each("geometry", GEOMETRIES)
def test_attention_is_that_of_torch(
    teams: list[NativeKernels], geometry: LayerGeometry, options: AttentionOptions
) -> None:
    paged = Paged(geometry, num_heads=6)
    expected = paged.run(TiledAttention(), options)
    results = [paged.run(NativeAttention(kernels), options) for kernels in teams]
    torch.testing.assert_close(results[0], expected, rtol=2e-5, atol=2e-5)
    assert all(torch.equal(result, results[0]) for result in results)


def test_attention_survives_scores_at_the_ends_of_the_range(teams: list[NativeKernels]) -> None:
    paged = Paged(LayerGeometry(2, 64, 64), num_heads=6)
    paged.query *= 100
    result = paged.run(NativeAttention(teams[0]), AttentionOptions(1.0))
    torch.testing.assert_close(result, paged.run(TiledAttention(), AttentionOptions(1.0)), rtol=1e-3, atol=1e-3)


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
