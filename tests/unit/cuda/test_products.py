"""Row-invariant products on a GPU: what they compute, and that the number of rows and their company change no bit."""

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from bench.launches import LaunchCounter
from specdec.engine.checkpoints.fp8 import FP8, FP8_MOST, Fp8Weight, round_to_fp8
from specdec.engine.cuda.products import ProductTiles, fp8_linear, ordered_linear, product_tiles
from tests.support.engine.triton_device import DEVICE

ROW_COUNTS = (1, 2, 7, 8, 16, 17, 64)


def data(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows * num_inputs)
    shapes = ((num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,))
    rows, weight, bias = (torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes)
    return rows, weight, bias


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"), [(1, 64, 32), (3, 50, 17), (18, 96, 70), (40, 33, 5), (0, 8, 8)]
)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_products_are_those_of_torch(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, error: float
) -> None:
    rows, weight, bias = (each.to(dtype) for each in data(num_rows, num_inputs, num_outputs))
    scale = num_inputs**0.5
    for own_bias in (None, bias):
        got = ordered_linear(rows, weight, own_bias)
        expected = torch.nn.functional.linear(rows.float(), weight.float(), None if own_bias is None else bias.float())
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected, rtol=error, atol=error * scale)


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_in_tiles_of_any_size(dtype: torch.dtype) -> None:
    rows, weight, bias = (each.to(dtype) for each in data(ROW_COUNTS[-1], 80, 40))
    expected = ordered_linear(rows, weight, bias)
    block_k = product_tiles(1, 40, dtype).block_k
    for num_rows in ROW_COUNTS:
        assert product_tiles(num_rows, 40, dtype).block_k == block_k
        first = len(rows) - num_rows
        assert torch.equal(ordered_linear(rows[first:], weight, bias), expected[first:]), num_rows
        tiles = ProductTiles(16, 16, block_k, num_warps=4, num_stages=2)
        assert torch.equal(ordered_linear(rows[first:], weight, bias, tiles), expected[first:]), num_rows


@pytest.mark.parametrize("num_outputs", [1024, 14336, 128256])
@pytest.mark.parametrize(("dtype", "tile_rows"), [(torch.float32, 16), (torch.bfloat16, 64)])
def test_no_number_of_rows_takes_tiles_that_have_another_instruction(
    num_outputs: int, dtype: torch.dtype, tile_rows: int
) -> None:
    tiles = [product_tiles(num_rows, num_outputs, dtype) for num_rows in range(1, 600)]
    assert {tile.block_m for tile in tiles} == {tile_rows}
    assert len({tile.block_k for tile in tiles}) == 1


def test_a_product_is_one_launch_and_reads_its_weight_once() -> None:
    rows = torch.empty(8, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(14336, 4096, dtype=torch.bfloat16, device="meta")
    with LaunchCounter() as counter:
        assert ordered_linear(rows, weight).shape == (8, 14336)
    assert [launch.name for launch in counter.launches] == ["product_kernel"]
    moved = sum(num_bytes for _, num_bytes in counter.operations)
    assert moved == 2 * (rows.numel() + weight.numel() + 8 * 14336)


@pytest.fixture
def nearest_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are rounded to 8 bits as a GPU does; the interpreter loses carries into the exponent."""
    plain = interpreter._convert_float

    def convert(values: Any, kind: Any, to_kind: Any, rounding: Any) -> Any:
        if to_kind.name != "fp8e4nv":
            return plain(values, kind, to_kind, rounding)
        return torch.from_numpy(np.ascontiguousarray(values)).to(FP8).view(torch.uint8).numpy()

    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.mark.usefixtures("nearest_fp8")
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [(1, 64, 32), (5, 1040, 48), (33, 96, 16)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_with_weights_of_8_bits_are_those_of_the_rounded_numbers(
    num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, num_inputs, generator=generator) * 10.0 ** torch.arange(num_rows)[:, None].clamp(max=4)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(torch.bfloat16)
    weight[3] *= 1000.0
    weight[4] = 0.0
    bias = torch.randn(num_outputs, generator=generator).to(torch.bfloat16) if has_bias else None
    rows = rows.to(torch.bfloat16)
    packed = Fp8Weight.of(weight)
    found = fp8_linear(
        rows.to(DEVICE),
        packed.numbers.to(DEVICE),
        packed.scales.to(DEVICE),
        None if bias is None else bias.to(DEVICE),
    ).cpu()
    scales = rows.float().abs().amax(1, keepdim=True) / FP8_MOST
    rounded = (rows.float() / scales).to(FP8).float() * scales
    expected = rounded @ packed.rounded(torch.float32).T + (0.0 if bias is None else bias.float())
    close = expected.abs().amax(1, keepdim=True) * 2.0**-7
    assert ((found.float() - expected).abs() <= close).all()


def test_weights_of_8_bits_are_numbers_of_16_and_rounding_them_again_changes_nothing() -> None:
    weight = torch.randn(64, 100, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-32, 32)[:, None]
    weight[5], weight[6, 1:] = 0.0, 0.0
    weight[7:40, :3] *= 2.0**-12  # among the least numbers of the format
    weight[7:40, 3] = FP8_MOST * 2.0 ** (torch.arange(33) // 4) * 0.996  # a peak that is rounded to the largest number
    rounded = round_to_fp8(weight.to(torch.bfloat16))
    again = Fp8Weight.of(rounded)
    assert torch.equal(again.rounded(torch.bfloat16), rounded)
    assert torch.equal(again.rounded(torch.float32), rounded.float())
    error = (rounded.float() - weight).abs() / weight.abs().amax(1, keepdim=True).clamp_min(1e-30)
    assert error[weight.abs().amax(1) > 1e-15].max() < 2.0**-4


def test_no_rows_launch_nothing_and_have_a_product() -> None:
    weight = torch.ones(16, 64, dtype=torch.bfloat16, device=DEVICE)
    packed, rows = Fp8Weight.of(weight), weight[:0]
    with LaunchCounter() as counter:
        products = [fp8_linear(rows, packed.numbers, packed.scales), ordered_linear(rows, weight)]
    assert [(each.shape, each.dtype) for each in products] == [((0, 16), torch.bfloat16)] * 2
    assert counter.operations == []


@pytest.mark.usefixtures("nearest_fp8")
def test_a_row_that_is_not_finite_gives_no_finite_product() -> None:
    rows = torch.ones(3, 64, dtype=torch.bfloat16, device=DEVICE)
    rows[0, 5], rows[1, 6] = float("nan"), float("inf")
    weight = Fp8Weight.of(torch.ones(16, 64, dtype=torch.bfloat16, device=DEVICE))
    found = fp8_linear(rows, weight.numbers, weight.scales).cpu()
    assert found[:2].isnan().all()
    assert (found[2] == 64.0).all()
