"""On CPU float32 a row's logits are the same bits in any company, chunking and number of threads."""

from pathlib import Path

import pytest
import torch

from specdec.engine.errors import ModelLoadError
from specdec.engine.model.runner import ModelRunner
from specdec.engine.settings import EngineSettings
from tests.support.engine import paged_scenarios as play
from tests.support.engine.tiny_models import VOCAB_SIZE, save_tiny_model

TOKENS = play.random_tokens(70, 5, VOCAB_SIZE)
WRONG = play.random_tokens(6, 6, VOCAB_SIZE)
OTHERS = [play.random_tokens(3 + 2 * i, 10 + i, VOCAB_SIZE) for i in range(31)]
PROMPT = 19
PATHS = {
    "fused, whole heads per thread": ("llama_wide_heads", {}),
    "fused, sliding window": ("mistral", {}),
    "fused, norms of queries and keys": ("qwen3", {}),
    "native": ("gemma2", {}),
    "native, learned positions": ("gpt2", {}),
    "native, experts": ("qwen2_moe", {}),
    "torch": ("llama", {"native": "off"}),
}


@pytest.fixture(scope="module", params=list(PATHS))
def runners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[ModelRunner]:
    """One runner per number of threads, 1 to 4."""
    name, settings = PATHS[request.param]
    directory = save_tiny_model(name, tmp_path_factory.mktemp("model"))
    base = {
        "model": str(directory),
        "device": "cpu",
        "num_blocks": 256,
        "max_model_len": 128,
        "deterministic": True,
    }
    return [
        ModelRunner.load(EngineSettings.model_validate({**base, **settings, "num_threads": threads}))
        for threads in (1, 2, 3, 4)
    ]


def all_ways(runner: ModelRunner) -> dict[str, play.Log]:
    """All of them with one thread, and with as many as divide no model's heads; with others, the first five."""
    ways = {
        "alone": play.play_alone(runner, TOKENS),
        "chunks of 13": play.play_alone(runner, TOKENS, max_batch_tokens=13),
        "batch of 32": play.play_in_batch(runner, TOKENS, OTHERS),
        "plain decode": play.play_decodes(runner, TOKENS, PROMPT),
        "tree nodes": play.play_trees(runner, TOKENS, PROMPT, WRONG),
    }
    if runner.settings.num_threads not in (1, 3):
        return ways
    return ways | {
        "chunks of 1": play.play_alone(runner, TOKENS, max_batch_tokens=1),
        "after a rollback": play.play_rollback(runner, TOKENS, PROMPT, WRONG),
        "cache hit": play.play_cache_hit(runner, TOKENS),
    }


def test_logits_of_a_token_are_equal_in_every_bit(runners: list[ModelRunner]) -> None:
    expected = {path: rows[0] for path, rows in play.play_alone(runners[0], TOKENS).items()}
    compared = 0
    for runner in runners:
        for way, log in all_ways(runner).items():
            for path, rows in log.items():
                for row in rows if path in expected else []:
                    assert torch.equal(row, expected[path]), (way, runner.settings.num_threads, len(path))
                    compared += 1
    assert compared > 4 * 5 * len(TOKENS)


def test_numerics_id_does_not_name_the_threads(runners: list[ModelRunner]) -> None:
    assert len({runner.numerics_id for runner in runners}) == 1


def test_demanding_row_invariance_where_there_is_none_is_an_error(tmp_path: Path) -> None:
    directory = save_tiny_model("llama", tmp_path)
    with pytest.raises(ModelLoadError, match="deterministic: needs dtype float32 on a CPU, or a GPU"):
        ModelRunner.load(EngineSettings(model=str(directory), dtype="bfloat16", deterministic=True))
