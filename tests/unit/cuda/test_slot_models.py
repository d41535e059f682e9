"""Batches of the slot on a GPU are what they say: a tree's rows go on as the sequence does."""

import pytest
import torch

from bench.gpu_slot import models
from bench.gpu_slot.models import StepSetup, chain_rows
from specdec.engine.cuda.buckets import bucket_of
from tests.support.engine.triton_device import DEVICE


@pytest.mark.parametrize("num_rows", [1, 2, 8, 11])
def test_rows_of_a_tree_that_are_the_sequences_own_have_its_logits(ordered_products: None, num_rows: int) -> None:
    model = models.make("8b", StepSetup(torch.device(DEVICE), dry=True), 64, row_invariant=True)
    with torch.inference_mode():
        whole = model.decoder(model.rows(0, 40), model.cache)
        tree = model.decoder(model.tree(20, num_rows), model.cache)
    chain = [0, *chain_rows(num_rows)]
    assert torch.equal(tree[chain], whole[20 : 20 + len(chain)])
    beside = [row for row in range(num_rows) if row not in chain]
    assert all((tree[row] != whole[20 : 20 + num_rows]).any(1).all() for row in beside)


def test_a_large_tree_is_a_captured_step() -> None:
    model = models.make("8b", StepSetup(torch.device(DEVICE), dry=True), 256)
    assert bucket_of(model.tree(100, 64), 17) == 64
    assert bucket_of(model.tree(100, 8), 17) == 8
