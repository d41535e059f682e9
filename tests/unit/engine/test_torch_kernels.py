"""What runs where there are no native kernels: attention and linear layers in torch, the same bits in any company."""

import pytest
import torch

from specdec.engine.attention import torch_kernels
from specdec.engine.attention.kv_cache import LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.attention.torch_kernels import GatherAttention, TiledAttention
from specdec.engine.model.linear import TorchWeight
from tests.support.engine.paged_attention import GEOMETRIES, OPTIONS, Paged, random_rows

# Above 1024 numbers oneDNN sums a row that is alone in another order, on CPUs with AVX-512; on older ones others.
SHAPES = [(331, 200), (512, 2048), (131, 4096)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_gathering_attention_of_other_devices_is_the_same(options: AttentionOptions) -> None:
    paged = Paged(LayerGeometry(2, 24, 24), num_heads=6)
    expected = paged.run(TiledAttention(), options)
    torch.testing.assert_close(paged.run(GatherAttention(), options), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_row_attends_alone_and_in_any_company_with_the_same_bits(
    geometry: LayerGeometry, options: AttentionOptions
) -> None:
    paged = Paged(geometry, num_heads=6)
    cache = paged.empty_cache()
    rows = range(len(paged.query))
    together = paged.run_rows(TiledAttention(), options, rows, cache)
    for row in rows:
        assert torch.equal(paged.run_rows(TiledAttention(), options, [row], cache)[0], together[row]), row
    backwards = paged.run_rows(TiledAttention(), options, rows[::-3], cache)
    assert torch.equal(backwards, together[torch.tensor(rows[::-3])])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_attention_in_many_small_parts_has_the_same_bits(
    options: AttentionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = Paged(LayerGeometry(2, 24, 24), num_heads=6)
    expected = paged.run(TiledAttention(), options)
    for limit in (1, 6 * 24 * torch_kernels.TILE * 2, 6 * 24 * torch_kernels.TILE * 7):
        monkeypatch.setattr(torch_kernels, "_PRODUCT_ELEMENTS", limit)
        assert torch.equal(paged.run(TiledAttention(), options), expected), limit


@pytest.mark.parametrize(("num_outputs", "depth"), SHAPES)
def test_a_torch_product_of_a_row_has_the_same_bits_for_any_rows_and_threads(num_outputs: int, depth: int) -> None:
    weight, bias = random_rows(num_outputs, depth), random_rows(num_outputs, seed=1)
    rows = random_rows(67, depth, seed=2)
    same = TorchWeight(weight, bias, 1)(rows)
    for num_threads in (1, 2, 3, 4):
        packed = TorchWeight(weight, bias, num_threads)
        for count in (1, 2, 7, 8, 9, 16, 31, 66):
            assert torch.equal(packed(rows[:count]), same[:count]), count
            assert torch.equal(packed(rows[67 - count :]), same[67 - count :]), count


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_torch_product_is_the_linear_layer_with_onednn_and_without(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = random_rows(131, 100), random_rows(131, seed=1) if has_bias else None
    packed = [TorchWeight(weight, bias, 2)]
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    packed.append(TorchWeight(weight, bias, 2))
    for num_rows in (0, 1, 8, 13, 40):
        rows = random_rows(num_rows, 100, seed=2)
        expected = torch.nn.functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
        for product in packed:
            torch.testing.assert_close(product(rows).double(), expected, rtol=1e-5, atol=1e-4)


def test_a_torch_product_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    TorchWeight(random_rows(8, 8), None, before + 1)(random_rows(3, 8))
    assert torch.get_num_threads() == before
