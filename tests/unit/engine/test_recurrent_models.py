"""Models with recurrent layers: transformers' logits, and the same bits in chunks, batches, trees and rollbacks."""

from pathlib import Path

import pytest
import torch

from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from tests.support.engine.dense_reference import SCENARIOS, Reference
from tests.support.engine.recurrent_models import RECURRENT, save_recurrent_model
from tests.support.for_each import for_each

MAX_ERROR = 2e-5  # root mean square, of the standard deviation; transformers' own chunks and steps differ by 0.7e-5


def load(directory: Path, **settings: object) -> ModelRunner:
    defaults: dict[str, object] = {"model": str(directory), "block_size": 8, "num_blocks": 64, "device": "cpu"}
    return ModelRunner.load(EngineSettings.model_validate({**defaults, **settings}))


def check_all_ways(directory: Path, **settings: object) -> None:
    """Compare all ways to compute a sequence with transformers, and with each other bit by bit."""
    runner, reference = load(directory, **settings), Reference(directory)
    logs = {way: play(runner) for way, play in SCENARIOS.items()}
    errors = {way: float(reference.errors(log).square().mean().sqrt() / reference.spread) for way, log in logs.items()}
    assert max(errors.values()) < MAX_ERROR, errors
    whole = logs["whole prefill"]
    for way, log in logs.items():
        for path, rows in log.items():
            for row in rows:
                assert torch.equal(row, whole.get(path, rows)[0]), (way, len(path))


@for_each("name", RECURRENT)
def test_logits_are_those_of_one_dense_forward_and_the_same_bits_in_every_way(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_all_ways(save_recurrent_model(name, tmp_path_factory.mktemp(name)), deterministic=True)


@for_each("name", ["qwen3_next", "mamba"])
def test_threads_change_no_bit(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = save_recurrent_model(name, tmp_path_factory.mktemp(name))
    one, three = (SCENARIOS["trees"](load(directory, num_threads=threads)) for threads in (1, 3))
    assert all(torch.equal(row, one[path][0]) for path, rows in three.items() for row in rows)


@for_each("name", ["qwen3_next", "bamba"])
def test_torch_alone_gives_the_same_guarantees(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_all_ways(save_recurrent_model(name, tmp_path_factory.mktemp(name)), native="off", deterministic=True)
