"""Paged attention in Triton: what it computes, and that a row's bits depend on its own tokens only."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.launches import LaunchCounter
from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.attention.torch_kernels import TiledAttention
from specdec.engine.cuda import attention
from specdec.engine.cuda.attention import LaunchShape, TritonAttention, launch_shape, plan_work
from specdec.engine.cuda.buckets import PassShape
from tests.support.engine.paged_attention import BLOCK_SIZE, Paged
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


@pytest.fixture(params=[1, 1 << 26], ids=["in parts of few rows", "all rows at once"])
def small_splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", SMALL_SPLIT)
    monkeypatch.setattr(attention, "_MOST_PART_BYTES", request.param)


@pytest.mark.usefixtures("small_splits")
@EXAMPLES
@given(rows=ragged_rows(DEVICE), options=st.sampled_from(OPTIONS))
def test_rows_attend_as_the_tiled_kernel_has_them(rows: RaggedRows, options: AttentionOptions) -> None:
    expected, expected_cache = rows.run(TiledAttention(), options)
    got, cache = rows.run(TritonAttention(), options)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.keys[0], expected_cache.keys[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cache.values[0], expected_cache.values[0], rtol=0, atol=0, equal_nan=True)


def test_keys_and_values_of_8_bits_are_stored_and_read_as_the_tiled_kernel_has_them() -> None:
    rows = Paged(LayerGeometry(NUM_HEADS // 3, 16, 24), NUM_HEADS)
    rows.key[::7] *= 1000  # beyond what 8 bits hold
    found = []
    for kernel in (TiledAttention(), TritonAttention()):
        cache = KVCache([rows.geometry], rows.num_blocks, BLOCK_SIZE, torch.float8_e4m3fn, torch.device(DEVICE))
        out = rows.run_rows(kernel, OPTIONS[-1], range(len(rows.query)), cache)
        found.append((out, *(store[0].view(torch.uint8) for store in (cache.keys, cache.values))))
    (expected, *wanted), (got, *stored) = found
    assert all(torch.equal(a, b) for a, b in zip(stored, wanted, strict=True))
    assert stored[0].any()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dim", "num_kv_heads", "group", "most_part_bytes"),
    [(64, 1, 16, 1 << 26), (80, 2, 1, 1), (96, 1, 7, 1 << 26), (128, 2, 8, 1), (256, 1, 4, 1 << 26)],
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
    monkeypatch.setattr(attention, "_MOST_PART_BYTES", 1)
    assert torch.equal(rows.run(kernel, options)[0], together)


@EXAMPLES
@given(rows=ragged_rows(DEVICE, torch.float16, max_len=150), options=st.sampled_from(OPTIONS))
def test_large_passes_have_large_tiles_and_attend_alike(
    rows: RaggedRows, options: AttentionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = rows.run(TritonAttention(), options)
    with monkeypatch.context() as patch:
        patch.setattr(attention, "MOST_FINE_ROWS", 0)
        patch.setattr(attention, "_PREFILL_SPLIT", 128)
        got, _ = rows.run(TritonAttention(), options)
    torch.testing.assert_close(got, expected, rtol=4e-3, atol=4e-3)


def test_a_path_that_leaves_the_table_and_begins_another_split_is_the_rows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's drafted tokens have no blocks in the table of their sequence."""
    monkeypatch.setattr(attention, "SPLIT", SMALL_SPLIT)
    chains = [-1, 0, 1, 2, -1, 4, 5]
    rows = lay_out([(SMALL_SPLIT, 1, chains), (30, 1, [])], LayerGeometry(1, 16, 16), 8, torch.float32, DEVICE, 3)
    expected, _ = rows.run(TiledAttention(), OPTIONS[0])
    rows.batch = replace(rows.batch, block_tables=rows.batch.block_tables[:, : SMALL_SPLIT // 8])
    got, _ = rows.run(TritonAttention(), OPTIONS[0])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_a_row_that_is_not_finite_never_looks_finite_and_harms_no_other_sequence(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maxima on a GPU leave NaN out."""
    monkeypatch.setattr(attention, "SPLIT", SMALL_SPLIT)
    rows = lay_out([(70, 12, TREE), (64, 2, [])], LayerGeometry(1, 16, 16), 8, torch.float32, DEVICE, 1)
    expected, _ = rows.run(TritonAttention(), OPTIONS[0])
    getattr(rows, what)[3] = float("nan")
    got, _ = rows.run(TritonAttention(), OPTIONS[0])
    spoiled = got[3:4] if what == "query" else got[3:17]
    assert spoiled.isnan().all()
    assert torch.equal(got[17:], expected[17:])
    assert torch.equal(got[:3], expected[:3]), "which do not see it"
    if what == "query":
        assert torch.equal(got[4:], expected[4:])


def work_of(rows: RaggedRows, shape: LaunchShape, window: int = 0) -> list[tuple[int, int, int]]:
    """First row, end row and split of all entries, sorted."""
    found = []
    for work in plan_work(rows.batch, shape, rows.cache.block_size, window, 64):
        num = int(work.entries[0])
        assert num <= work.most
        columns = [work.entries[1 + at * work.most :][:num].tolist() for at in range(3)]
        found += list(zip(*columns, strict=True))
    return sorted(found)


@settings(EXAMPLES, max_examples=20)
@given(rows=ragged_rows(DEVICE), window=st.sampled_from((0, 1, 40)), part_bytes=st.sampled_from((1 << 26, 1)))
def test_the_device_lists_each_split_that_a_row_sees_once_and_none_that_no_row_sees(
    rows: RaggedRows, window: int, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(launch_shape(6, LayerGeometry(2, 16, 16), torch.float32), rows_per_tile=4, split=16)
    batch = rows.batch
    lines = list(zip(*(each.tolist() for each in (batch.row_seq, batch.position_ids, batch.context_lens)), strict=True))
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_MOST_PART_BYTES", part_bytes)
        listed = work_of(rows, shape, window)
    told = []
    for first, end, split in listed:
        assert end - first <= shape.rows_per_tile
        assert len({lines[row][0] for row in range(first, max(end, first + 1))}) == 1, "rows of one sequence"
        shared = [row for row in range(first, end) if lines[row][2] > lines[row][1] or lines[row][2] // 16 > split]
        seen = [row for row in (shared or [first]) if split <= lines[row][1] // 16]
        assert any(split >= (max(0, lines[row][1] - window + 1) if window else 0) // 16 for row in seen)
        told += [(row, split) for row in seen]
    assert len(told) == len(set(told))
    wanted = {
        (row, split)
        for row, (_, position, _) in enumerate(lines)
        for split in range((max(0, position - window + 1) if window else 0) // 16, position // 16 + 1)
    }
    assert wanted <= set(told)


def test_no_program_walks_a_long_context_alone_and_none_is_launched_for_a_table() -> None:
    """One row at 128k beside 31 short ones: equal entries, for a fixed number of programs."""
    context, num_rows = 1 << 17, 32
    rows = lay_out([(9, 1, [])] * num_rows, LayerGeometry(8, 16, 16), 16, torch.float32, DEVICE, 0, 32)
    positions = torch.full((num_rows,), 1000, device=DEVICE)
    positions[5] = context - 1
    tables = torch.zeros(num_rows, context // 16, dtype=torch.int32, device=DEVICE)
    rows.batch = replace(rows.batch, position_ids=positions, context_lens=(positions + 1).int(), block_tables=tables)
    shape = launch_shape(32, LayerGeometry(8, 128, 128), torch.bfloat16)
    entries = work_of(rows, shape)
    assert len(entries) == len(set(entries)) == context // shape.split + (num_rows - 1) * (1000 // shape.split + 1)
    meta = torch.device("meta")
    cache = KVCache([LayerGeometry(8, 128, 128)], 1, 16, torch.bfloat16, meta)
    query = torch.empty(num_rows, 32, 128, dtype=torch.bfloat16, device=meta)
    with LaunchCounter() as counter:
        for table in (64, context // 16):
            attention.attend(
                query, 0, PassShape(table, 0, 16, meta).empty_batch(num_rows), cache, AttentionOptions(1.0), {}
            )
    grids = [launch.grid for launch in counter.launches if launch.name == "attention_kernel"]
    assert {grid[0] * grid[1] for grid in grids} == {attention._PROGRAMS}


@pytest.mark.parametrize(
    ("num_heads", "geometry", "rows", "queries"),
    [(32, (8, 128, 128), 4, 16), (32, (32, 64, 64), 16, 16), (28, (4, 128, 128), 2, 16), (64, (1, 64, 64), 1, 64)],
)
def test_a_program_takes_sixteen_queries_with_four_warps_and_more_in_large_passes_that_need_not_be_invariant(
    num_heads: int, geometry: tuple[int, int, int], rows: int, queries: int
) -> None:
    heads = LayerGeometry(*geometry)
    shape = launch_shape(num_heads, heads, torch.bfloat16, 256, row_invariant=False)
    assert (shape.rows_per_tile, shape.block_m, shape.num_warps) == (rows, queries, 4)
    large = launch_shape(num_heads, heads, torch.bfloat16, 257, row_invariant=False)
    assert (large.block_m, large.rows_per_tile) == (128, 128 // (num_heads // geometry[0]))
    assert {each.split % each.block_n for each in (shape, large)} == {0}
    assert launch_shape(num_heads, heads, torch.bfloat16, 4096) == shape
