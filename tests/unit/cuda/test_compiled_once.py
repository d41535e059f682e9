"""A kernel is compiled for a model, not for a batch: nothing that a batch decides is a part of what is compiled."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from bench.launches import LaunchCounter
from specdec.engine.attention.kv_cache import KVCache, LayerGeometry
from specdec.engine.attention.paged import AttentionOptions
from specdec.engine.batch import Batch
from specdec.engine.cuda.launch import Launch
from specdec.engine.cuda.sampling import launch_scores, launch_top
from specdec.engine.model.device_decoder import DeviceDecoder
from specdec.engine.model.loader import random_model
from tests.support.engine.triton_device import DEVICE, specialization

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="what is interpreted keeps what `triton.jit` was told")

META = torch.device("meta")
GEOMETRY = LayerGeometry(2, 64, 64)
CONFIG = LlamaConfig(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=2,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=151936,
)
NUM_ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 300)
CONTEXTS = (16, 512, 700, 1100, 2080, 4096)
BLOCK_SIZE = 16


def packed_batch(num_rows: int, context_len: int) -> Batch:
    """One sequence's rows, whose tensors lie one behind the other as they come in one copy."""
    wide = {"input_ids": num_rows, "position_ids": num_rows, "slot_mapping": num_rows, "logits_indices": num_rows}
    narrow = {"row_seq": num_rows, "context_lens": num_rows, "path_offsets": num_rows + 1, "path_slots": num_rows}
    narrow["block_tables"] = -(-context_len // BLOCK_SIZE)
    parts: dict[str, torch.Tensor] = {}
    for sizes, dtype in ((wide, torch.int64), (narrow, torch.int32)):
        whole = torch.empty(sum(sizes.values()), dtype=dtype, device=META)
        parts |= dict(zip(sizes, whole.split(list(sizes.values())), strict=True))
    parts["block_tables"] = parts["block_tables"].view(1, -1)
    return Batch(**parts, num_seqs=1)


def compiled(launches: list[Launch]) -> dict[str, int]:
    """How often each kernel is compiled."""
    found: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    for launch in launches:
        found[launch.name].add(specialization(launch))
    return {name: len(kinds) for name, kinds in found.items()}


@pytest.mark.parametrize("row_invariant", [False, True], ids=["fast", "deterministic"])
@torch.inference_mode()
def test_no_number_of_rows_and_no_context_has_kernels_of_its_own(row_invariant: bool) -> None:
    decoder = DeviceDecoder(
        random_model(CONFIG, torch.bfloat16, META), [AttentionOptions(0.125)] * 2, 8192,
        row_invariant=row_invariant,
    )  # fmt: skip
    cache = KVCache([GEOMETRY] * 2, 4, BLOCK_SIZE, torch.bfloat16, META)
    with LaunchCounter() as counter:
        for num_rows in NUM_ROWS:
            for context_len in CONTEXTS:
                decoder(packed_batch(num_rows, context_len), cache)
    expected = {"add_norm_kernel": 1, "rotate_write_kernel": 1}
    kinds = 1 if row_invariant else 2  # of large passes too
    expected |= dict.fromkeys(("plan_kernel", "attention_kernel", "fold_kernel"), kinds)
    if row_invariant:
        expected["product_kernel"] = 2 * 5  # of few rows and of many: four of layers, and the logits
    assert compiled(counter.launches) == expected


def test_no_number_of_rows_has_kernels_of_its_own_that_cut_and_draw() -> None:
    counts = []
    for rows in (NUM_ROWS[-1:], NUM_ROWS):
        with LaunchCounter() as counter:
            for num_rows in rows:
                logits = torch.empty(num_rows, CONFIG.vocab_size, device=META)
                numbers = torch.empty(num_rows, 5, dtype=torch.float64, device=META)
                scores = launch_scores(logits, numbers, (True, True))
                launch_top(scores, numbers, torch.empty(num_rows, 2, dtype=torch.int32, device=META), 4)
        counts.append(compiled(counter.launches))
    assert counts[0] == counts[1]
