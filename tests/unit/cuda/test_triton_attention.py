"""Paged attention in Triton: what it computes, and that a row's bits depend on its own tokens only."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.engine.attention.kv_cache import LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.attention.torch_kernels import TiledAttention
from specdec.engine.cuda import attention
from specdec.engine.cuda.attention import TritonAttention, launch_shape, plan_tiles
from tests.support.engine.ragged_rows import NUM_HEADS, RaggedRows, lay_out, ragged_rows
from tests.support.engine.triton_device import DEVICE

EXAMPLES = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
SMALL_SPLIT = 64
OPTIONS = [
    AttentionOptions(0.3),
    AttentionOptions(0.3, sliding_window=1),
    AttentionOptions(0.3, sliding_window=5),
    AttentionOptions(0.3, sliding_window=70),
    AttentionOptions(0.3, softcap=2.0),
    AttentionOptions(0.3, sinks=torch.linspace(-2, 2, NUM_HEADS, device=DEVICE)),
    AttentionOptions(0.3, sliding_window=33, softcap=1.5, sinks=torch.linspace(-1, 3, NUM_HEADS, device=DEVICE)),
]
TREE = [-1, -1, 1, 0, 2]


@pytest.fixture(params=[0, 1 << 26], ids=["one program for all splits", "a program for each split"])
def small_splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "SPLIT", SMALL_SPLIT)
    monkeypatch.setattr(attention, "_MOST_PART_BYTES", request.param)
    return


@pytest.mark.usefixtures("small_splits")
@EXAMPLES
@given(rows=ragged_rows(DEVICE), options=st.sampled_from(OPTIONS))
def test_rows_attend_as_the_tiled_kernel_has_them(rows: RaggedRows, options: AttentionOptions) -> None:
    expected, expected_cache = rows.run(TiledAttention(), options)
    got, cache = rows.run(TritonAttention(), options)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.keys[0], expected_cache.keys[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.values[0], expected_cache.values[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dim", "num_kv_heads", "group", "most_part_bytes"),
    [(64, 1, 16, 1 << 26), (80, 2, 1, 0), (96, 1, 7, 1 << 26), (128, 2, 8, 0), (256, 1, 4, 1 << 26)],
)
@settings(EXAMPLES, max_examples=3)
@given(data=st.data())
def test_heads_and_groups_of_any_model_attend_as_the_tiled_kernel_has_them(
    dim: int,
    num_kv_heads: int,
    group: int,
    most_part_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    data: st.DataObject,
) -> None:
    monkeypatch.setattr(attention, "SPLIT", SMALL_SPLIT)
    monkeypatch.setattr(attention, "_MOST_PART_BYTES", most_part_bytes)
    num_heads, geometry = num_kv_heads * group, LayerGeometry(num_kv_heads, dim, dim)
    drawn = ragged_rows(DEVICE, max_len=80, geometries=(geometry,), num_heads=num_heads, most_nodes=12)
    rows, window = data.draw(drawn), data.draw(st.sampled_from((None, 1, 7, 40)))
    sinks = torch.linspace(-2, 2, num_heads, device=DEVICE)
    options = AttentionOptions(dim**-0.5, sliding_window=window, sinks=data.draw(st.sampled_from((None, sinks))))
    expected, _ = rows.run(TiledAttention(), options)
    got, _ = rows.run(TritonAttention(), options)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@EXAMPLES
@given(rows=ragged_rows(DEVICE, torch.float16, max_len=60), options=st.sampled_from(OPTIONS))
def test_half_precision_is_rounded_once_more_than_the_tiled_kernel(rows: RaggedRows, options: AttentionOptions) -> None:
    expected, _ = rows.run(TiledAttention(), options)
    got, _ = rows.run(TritonAttention(), options)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, expected, rtol=4e-3, atol=4e-3)


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]], ids=["plain", "window, softcap and sinks"])
def test_a_row_has_the_same_bits_alone_in_a_tree_in_a_prefill_and_in_any_split(
    options: AttentionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SPLIT", SMALL_SPLIT)
    rows = lay_out([(70, 12, TREE), (64, 2, []), (127, 1, TREE)], LayerGeometry(1, 16, 16), 8, torch.float32, DEVICE, 1)
    kernel = TritonAttention()
    together, cache = rows.run(kernel, options)
    for row in (0, 11, 14, 18, 19, 24):
        assert torch.equal(rows.run_row(kernel, options, row, cache), together[row]), f"row {row} alone"
        assert torch.equal(rows.run_in_place(kernel, options, row, cache), together[row]), f"row {row} as decoded"
    monkeypatch.setattr(attention, "_MOST_PART_BYTES", 0)
    assert torch.equal(rows.run(kernel, options)[0], together)


def test_tiles_hold_rows_of_one_sequence_and_every_row_once() -> None:
    rows = lay_out([(40, 20, []), (3, 3, TREE), (9, 1, [])], LayerGeometry(2, 16, 16), 8, torch.float32, DEVICE, 0)
    plan = plan_tiles(rows.batch, 16, 8)
    starts = plan.starts.tolist()
    assert starts == [0, 16, 20, 28, 29]
    assert plan.num_tiles == len(starts) - 1
    seqs = rows.batch.row_seq.tolist()
    for start, end in itertools.pairwise(starts):
        assert len(set(seqs[start:end])) <= 1


@pytest.mark.parametrize(
    ("num_heads", "geometry", "rows", "queries"),
    [(32, (8, 128, 128), 8, 32), (32, (32, 64, 64), 16, 16), (28, (4, 128, 128), 4, 32), (64, (1, 64, 64), 1, 64)],
)
def test_a_program_takes_sixteen_rows_or_what_gives_thirty_two_queries(
    num_heads: int, geometry: tuple[int, int, int], rows: int, queries: int
) -> None:
    shape = launch_shape(num_heads, LayerGeometry(*geometry), torch.bfloat16)
    assert (shape.rows_per_tile, shape.block_m) == (rows, queries)
    assert attention.SPLIT % shape.block_n == 0
