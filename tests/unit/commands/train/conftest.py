"""A target as small as it gets, and what it says."""

from __future__ import annotations

import pytest
import torch

from specdec.commands.train.job import Loaded, load_target
from specdec.commands.train.recorded.texts import Text, continuations
from tests.support.heads.targets import fixture_target


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("target")
    fixture_target(folder)
    return load_target(str(folder), "cpu", 1)


@pytest.fixture(scope="module")
def texts(loaded: Loaded) -> list[Text]:
    prompts = [[(7 * i + j) % 40 for j in range(6)] for i in range(24)]
    found = []
    for temperature in (0.0, 1.0):
        numbers = range(len(prompts))
        made = continuations(
            loaded.engine, loaded.runner, prompts, numbers, temperature=temperature, max_tokens=24, seed=1
        )
        outputs = [output for _, output in sorted(made)]
        found += [
            Text(tuple(prompt), tuple(output), temperature, number % 4 == 3)
            for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
        ]
    return found


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
