"""What is drawn and computed in one native call is, bit for bit, what single steps and the sampler would have drawn."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
from array import array
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.drafting.translation.runner import TranslatingRunner
from specdec.drafting.translation.shared import SharedVocabulary
from specdec.engine.batch import build_batch
from specdec.engine.drawing.native import DrawingDecoder
from specdec.engine.drawing.rows import Draw, DrawRow, DrawRule, OtherIds
from specdec.engine.model.runner import ModelRunner
from specdec.engine.runner import Runner
from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.engine.scheduler import ScheduledItem, ScheduledStep
from specdec.engine.sequence import Sequence
from specdec.engine.settings import EngineSettings
from specdec.wire.sampling_params import SamplingParams
from tests.support.engine.tiny_models import VOCAB_SIZE, save_tiny_model

BLOCK_SIZE = 4
BLOCKS_EACH = 10
MAX_ROWS = 5
NUM_TOP = 3
MOST_ROUNDS = 4

pytestmark = pytest.mark.usefixtures("native")


@cache
def runner_of(name: str, num_threads: int = 1) -> ModelRunner:
    with TemporaryDirectory() as directory:
        model = str(save_tiny_model(name, Path(directory)))
        num_blocks = BLOCKS_EACH * (MAX_ROWS + 1)
        options = EngineSettings(
            model=model, device="cpu", block_size=BLOCK_SIZE, num_blocks=num_blocks, num_threads=num_threads
        )
        return ModelRunner.load(options)


def drawing_of(runner: ModelRunner) -> DrawingDecoder:
    assert runner.fused is not None
    return DrawingDecoder(*runner.fused, runner.vocab_size)


def logits_of(runner: Runner, token_ids: list[int], line: int, start: int = 0) -> torch.Tensor:
    """Logits [1, V] of the last token; tokens from `start` on are computed in the blocks of `line`."""
    seq = Sequence(seq_id=0, token_ids=token_ids, num_prompt_tokens=len(token_ids), block_ids=blocks_of(line))
    item = ScheduledItem(seq, start, len(token_ids) - start, 0, completes=True)
    return runner.forward(build_batch(ScheduledStep([item]), BLOCK_SIZE, "cpu")[0])


def blocks_of(line: int) -> array[int]:
    return array("i", range(line * BLOCKS_EACH, (line + 1) * BLOCKS_EACH))


def params_of(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 3, **options})


def single_steps(
    runner: Runner, prompt: list[int], params: SamplingParams, num_rounds: int, vocab_size: int = VOCAB_SIZE
) -> list[Draw]:
    """The same draws, each from a prefill of its own and by the sampler."""
    sampler = Sampler(vocab_size, "cpu")
    tokens, draws = list(prompt), []
    for _ in range(num_rounds):
        row = RowContext(params, len(tokens), len(prompt))
        [best] = sampler.candidates(logits_of(runner, tokens, MAX_ROWS), [row], NUM_TOP)
        draws.append(([c.token_id for c in best], [c.score for c in best]))
        tokens.append(best[0].token_id)
        if tokens[-1] in params.stop_token_ids or (tokens[-1] in params.eos_token_ids and not params.ignore_eos):
            break
    return draws


def possible(draw: Draw) -> Draw:
    """Without the tokens that could not be drawn."""
    pairs = [(token, score) for token, score in zip(*draw, strict=True) if score > -math.inf]
    return [token for token, _ in pairs], [score for _, score in pairs]


def draw_all(
    runner: ModelRunner, prompts: list[list[int]], many: list[SamplingParams], rounds: list[int], **options: Any
) -> list[list[Draw]]:
    logits = torch.cat([logits_of(runner, prompt, line) for line, prompt in enumerate(prompts)])
    rows = [
        DrawRow(DrawRule(params), line, len(prompt), num_rounds, blocks_of(line), **options)
        for line, (prompt, params, num_rounds) in enumerate(zip(prompts, many, rounds, strict=True))
    ]
    return drawing_of(runner).draw(rows, logits, NUM_TOP)


prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30)
parameters = st.builds(
    params_of,
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 9),
    temperature=st.sampled_from([0.0, 1e-40, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    stop_token_ids=st.sampled_from([(), tuple(range(0, VOCAB_SIZE, 5))]),
    eos_token_ids=st.sampled_from([(), tuple(range(1, VOCAB_SIZE, 5))]),
    ignore_eos=st.booleans(),
)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
@given(chosen=st.lists(st.tuples(prompts, parameters, st.integers(1, MOST_ROUNDS)), min_size=1, max_size=MAX_ROWS))
@settings(max_examples=40, deadline=None)
def test_draws_are_those_of_single_steps(name: str, chosen: list[tuple[list[int], SamplingParams, int]]) -> None:
    runner = runner_of(name)
    contexts, many, rounds = (list(each) for each in zip(*chosen, strict=True))
    drawn = draw_all(runner, contexts, many, rounds)
    for line, (prompt, params, num_rounds) in enumerate(chosen):
        assert [possible(draw) for draw in drawn[line]] == single_steps(runner, prompt, params, num_rounds)
        tokens = [*prompt, *(token_ids[0] for token_ids, _ in drawn[line])]
        following = logits_of(runner, tokens, line, start=len(tokens) - 1)
        assert torch.equal(following, logits_of(runner, tokens, MAX_ROWS)), "its keys and values are those of a prefill"


def ids_of(inputs: list[int], seed: int, share: float) -> OtherIds:
    """Ids that go in as `inputs`, and of which about a share can be drawn, the first one in any case."""
    rng = random.Random(seed)
    own = rng.sample(range(VOCAB_SIZE), VOCAB_SIZE)
    drawn = own[: len(inputs)]
    columns = [column if not index or rng.random() < share else -1 for index, column in enumerate(drawn)]
    return OtherIds(inputs, columns)


other_ids = st.builds(
    ids_of,
    inputs=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=VOCAB_SIZE),
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)


@given(
    ids=other_ids,
    chosen=st.lists(st.tuples(prompts, parameters, st.integers(1, MOST_ROUNDS)), min_size=1, max_size=MAX_ROWS),
)
@settings(max_examples=60, deadline=None)
def test_draws_by_other_ids_are_those_of_single_steps_by_these_ids(
    ids: OtherIds, chosen: list[tuple[list[int], SamplingParams, int]]
) -> None:
    runner, num_ids = runner_of("llama"), len(ids.columns)
    vocabulary = SharedVocabulary(num_ids, 0, 0, tuple(ids.inputs), tuple(ids.columns), ())
    translating = TranslatingRunner(runner, vocabulary, num_ids, torch.device("cpu"))
    contexts = [[token_id % num_ids for token_id in prompt] for prompt, _, _ in chosen]
    logits = torch.cat([logits_of(translating, prompt, line) for line, prompt in enumerate(contexts)])
    rows = [
        DrawRow(DrawRule(params), line, len(contexts[line]), num_rounds, blocks_of(line))
        for line, (_, params, num_rounds) in enumerate(chosen)
    ]
    drawn = drawing_of(runner).by_ids(ids).draw(rows, logits, NUM_TOP)
    for line, (_, params, num_rounds) in enumerate(chosen):
        expected = single_steps(translating, contexts[line], params, num_rounds, num_ids)
        assert [possible(draw) for draw in drawn[line]] == expected
        tokens = [*contexts[line], *(token_ids[0] for token_ids, _ in drawn[line])]
        following = logits_of(translating, tokens, line, start=len(tokens) - 1)
        assert torch.equal(following, logits_of(translating, tokens, MAX_ROWS)), (
            "keys and values are those of a prefill"
        )


@pytest.mark.parametrize(
    ("inputs", "columns"), [([0], [VOCAB_SIZE]), ([0], [-2]), ([VOCAB_SIZE], [0]), ([-1], [0]), ([0], [0, 1])]
)
def test_ids_that_the_model_does_not_have_are_refused(inputs: list[int], columns: list[int]) -> None:
    with pytest.raises(ValueError, match=r"ids, of which|none of the model's"):
        drawing_of(runner_of("llama")).by_ids(OtherIds(inputs, columns))


def test_several_threads_draw_the_same() -> None:
    contexts = [[5, 6, 7], [9], list(range(20))]
    many = [params_of(temperature=0.0), params_of(temperature=1.0, seed=9), params_of(temperature=0.7, top_p=0.8)]
    [first, *others] = [draw_all(runner_of("llama", n), contexts, many, [4, 3, 4]) for n in (1, 2, 3)]
    assert [len(draws) for draws in first] == [4, 3, 4]
    assert all(other == first for other in others)


def test_a_call_whose_rows_end_one_by_one_has_memory_for_the_few_that_are_left() -> None:
    """Of few rows every thread holds a norm of its own, which takes more memory than one norm of some more rows."""
    runner = runner_of("llama", 3)
    assert runner.fused is not None
    decoder, _ = runner.fused
    floats = decoder.library.specdec_decoder_workspace
    needed = [floats(ctypes.byref(decoder._decoder), num_rows, 3) for num_rows in range(1, 65)]
    assert needed == sorted(needed)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}])
def test_logits_that_are_not_finite_end_their_row_alone_and_have_no_scores(bad: float, options: dict[str, Any]) -> None:
    runner = runner_of("llama")
    logits = torch.cat([logits_of(runner, [5, 6, 7], 0), logits_of(runner, [8, 9], 1)])
    logits[0, :] = bad if bad < 0 else logits[0, :]
    logits[0, 3] = bad
    rule = DrawRule(params_of(**options))
    rows = [DrawRow(rule, 0, 3, 3, blocks_of(0)), DrawRow(rule, 1, 2, 3, blocks_of(1))]
    [spoiled, whole] = drawing_of(runner).draw(rows, logits, NUM_TOP)
    [(_, scores)] = spoiled
    assert all(math.isnan(score) for score in scores)
    assert [possible(draw) for draw in whole] == single_steps(runner, [8, 9], params_of(**options), 3)


def test_a_path_that_is_not_worth_going_on_ends() -> None:
    [draws] = draw_all(runner_of("llama"), [[5, 6, 7]], [params_of(temperature=1.0)], [4], least_path_score=1.1)
    assert len(draws) == 1


@pytest.mark.parametrize("options", [{"least_fork_score": 0.0}, {"ends_all": True, "least_path_score": 1.1}])
def test_a_row_that_changes_who_steps_next_ends_the_rounds_of_all(options: dict[str, Any]) -> None:
    runner = runner_of("llama")
    logits = torch.cat([logits_of(runner, [5, 6, 7], 0), logits_of(runner, [8, 9], 1)])
    rule = DrawRule(params_of(temperature=1.0))
    rows = [DrawRow(rule, 0, 3, 4, blocks_of(0)), DrawRow(rule, 1, 2, 4, blocks_of(1), **options)]
    for each in itertools.permutations(rows):
        assert [len(draws) for draws in drawing_of(runner).draw(each, logits, NUM_TOP)] == [1, 1]


def test_a_position_out_of_the_models_range_is_an_error_and_nothing_is_computed() -> None:
    runner = runner_of("llama")
    row = DrawRow(DrawRule(params_of()), 0, runner.max_model_len, 2, array("i", [0] * 100))
    with pytest.raises(IndexError, match="position"):
        drawing_of(runner).draw([row], logits_of(runner, [5], 0), NUM_TOP)


@pytest.mark.parametrize("options", [{"logit_bias": {5: 1.0}}, {"repetition_penalty": 1.2}, {"min_tokens": 3}])
def test_the_native_call_takes_no_rows_whose_logits_are_adjusted(options: dict[str, Any]) -> None:
    runner = runner_of("llama")
    drawing, rule = drawing_of(runner), DrawRule(params_of(**options))
    assert not drawing.takes(rule)
    with pytest.raises(ValueError, match="adjust"):
        drawing.draw([DrawRow(rule, 0, 1, 2, blocks_of(0))], logits_of(runner, [5], 0), NUM_TOP)
