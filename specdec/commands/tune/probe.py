"""Measures one model in its own process: `python -m specdec.commands.tune.probe`, with the task as JSON on stdin.

It writes progress to standard error, and at the end one line of JSON to standard output: `{"error": ...}`, or the
result of `measure`. It runs on its parent's choice of cores.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer

from specdec.drafting.translation.runner import TranslatingRunner
from specdec.drafting.translation.shared import Side, method_for, share_vocabulary, side_of_files
from specdec.drafting.translation.tokens import TokenBytes, TokenizerRefused
from specdec.engine.block_pool import BlockPool
from specdec.engine.engine import Engine
from specdec.engine.errors import EngineError
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.noise import Purpose, noise_key
from specdec.engine.sampling.perturbed_top import perturbed_top
from specdec.engine.sampling.sampler import RowContext, Sampler
from specdec.engine.scheduler import Scheduler
from specdec.engine.settings import EngineSettings
from specdec.engine.tree import TokenTree
from specdec.wire.sampling_params import SamplingParams

CONTEXT = 256
_WARMUP, _REPEATS, _MOST_S = 3, 15, 1.0
_PROMPT_REPEATS = 3
_NUM_RANKS, _NUM_SPARSE, _NUM_TARGET_TOP = 8, 64, 128
"""Searched ranks of the draft's order; tokens kept of the draft's distribution, as in serving; and of the target's."""
_AT_ONCE = 8
_MOST_PROMPT = 1024
"""Last tokens of a prompt that are used."""


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Measure step times, and outputs (of a target) or agreement with outputs (of a draft).

    The task has `settings` (of the engine), `sequences` and `rows` (numbers to measure), `candidates` (drawn per row
    at `temperature`), and optionally `prompt_rows` (lengths of a prompt's chunks to measure), and `prompts`,
    `temperatures` and `max_tokens`, or a target's `outputs`. A draft with another tokenizer has `target_model`: its
    steps and its agreement are then those of the shared tokens. Raises EngineError.
    """
    settings = EngineSettings(**task["settings"])
    _tell(f"loading {settings.model}")
    runner = ModelRunner.load(_with_room(settings, task))
    runner.warmup()
    pool = BlockPool(runner.num_blocks, runner.block_size)
    most_rows = settings.rows_of_step(runner.device.type)
    limits = most_rows, settings.max_batch_seqs, runner.max_model_len
    engine = Engine(runner, pool, Scheduler(pool, *limits, runner.session_states()))
    num_ids = _translate(engine, runner, task["target_model"]) if task.get("target_model") else runner.vocab_size
    found: dict[str, Any] = {"num_parameters": runner.num_parameters, "max_model_len": runner.max_model_len}
    if task.get("prompts"):
        found["outputs"] = _outputs(engine, runner, task)
    if task.get("outputs"):
        found["agreement"] = _agreement(engine, runner, num_ids, task["outputs"])
    found["step_ms"] = {
        count: {
            rows: _step_ms(engine, runner, num_ids, count, rows, task)
            for rows in task["rows"]
            if rows == 1 or count * rows <= most_rows
        }
        for count in task["sequences"]
    }
    found["prompt_ms"] = {
        rows: _prompt_ms(engine, runner, num_ids, rows)
        for rows in task.get("prompt_rows", ())
        if rows <= min(most_rows, runner.max_model_len - 1)
    }
    return found


def _translate(engine: Engine, runner: ModelRunner, target_model: str) -> int:
    """Make a draft's engine use a target's ids, as in serving; return their number."""
    try:
        own = Side(TokenBytes(runner.tokenizer_json), runner.vocab_size, tuple(runner.eos_token_ids))
    except TokenizerRefused as error:
        raise EngineError(str(error)) from error
    target, _ = side_of_files(target_model)
    vocabulary = share_vocabulary(target, own, runner.num_logits)
    if method_for(vocabulary, "auto") != "intersection":
        raise EngineError(
            f"it has {vocabulary.num_shared} of the target's {vocabulary.num_named} tokens: it would draft text"
        )
    engine.runner = TranslatingRunner(runner, vocabulary, vocabulary.num_target, runner.device)
    return vocabulary.num_target


def _with_room(settings: EngineSettings, task: dict[str, Any]) -> EngineSettings:
    """Settings with just enough KV blocks, so that a deployment may run at the same time."""
    longest = 2048 if settings.max_model_len is None else settings.max_model_len
    tokens = max(max(task["sequences"]) * (CONTEXT + 128), _AT_ONCE * longest)
    return settings.model_copy(update={"num_blocks": tokens // settings.block_size + 64})


def _outputs(engine: Engine, runner: ModelRunner, task: dict[str, Any]) -> list[dict[str, Any]]:
    """The model's output for each prompt at each temperature."""
    tokenizer = Tokenizer.from_str(runner.tokenizer_json)
    max_tokens = task["max_tokens"]
    room = runner.max_model_len - max_tokens - 1
    if room < 1:
        raise EngineError(f"{max_tokens} output tokens do not fit a context of {runner.max_model_len}")
    prompts = [tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt) for prompt in task["prompts"]]
    for number, prompt in enumerate(prompts, 1):
        if not prompt or max(prompt) >= runner.vocab_size:
            raise EngineError(f"prompt {number} has no token, or a token id outside the model's vocabulary")
        if len(prompt) > room:
            raise EngineError(
                f"prompt {number} has {len(prompt)} tokens, which leave no room for {max_tokens} more in a context of "
                f"{runner.max_model_len}"
            )
    prompts = [prompt[-_MOST_PROMPT:] for prompt in prompts]
    found = []
    for temperature in task["temperatures"]:
        for first in range(0, len(prompts), _AT_ONCE):
            _tell(f"target: outputs at temperature {temperature:g}, prompt {first + 1} of {len(prompts)}")
            found += _generate(engine, runner, prompts[first : first + _AT_ONCE], temperature, max_tokens, first)
    return found


def _generate(
    engine: Engine, runner: ModelRunner, prompts: Sequence[list[int]], temperature: float, max_tokens: int, seed: int
) -> list[dict[str, Any]]:
    sequences = [engine.add(prompt, num_prompt_tokens=len(prompt)) for prompt in prompts]
    found: list[dict[str, Any]] = [
        {"prompt": prompt, "tokens": [], "top": [], "temperature": temperature, "seed": seed + number}
        for number, prompt in enumerate(prompts)
    ]
    number_of = {seq.seq_id: number for number, seq in enumerate(sequences)}
    unfinished = len(sequences)
    while unfinished:
        out = engine.step()
        if out is None:
            raise EngineError("the KV cache has no room for the prompts")
        for item in out.items:
            if not item.completes:
                continue
            output = found[number_of[item.seq.seq_id]]
            logits = out.logits[item.rows.stop - 1 : item.rows.stop, : runner.vocab_size]
            (token,), _ = _ranked(logits, temperature, output["seed"], [len(item.seq.token_ids)], 1)
            if temperature > 0:
                num_top = min(_NUM_TARGET_TOP, runner.vocab_size)
                probabilities, ids = torch.softmax(logits[0] / temperature, 0).topk(num_top)
                output["top"].append([ids.tolist(), probabilities.tolist()])
            output["tokens"].append(token)
            if len(output["tokens"]) == max_tokens:
                engine.free(item.seq)
                unfinished -= 1
            else:
                engine.append(item.seq, [token])
    return found


def _ranked(
    logits: torch.Tensor, temperature: float, seed: int, positions: Sequence[int], num_top: int
) -> tuple[list[int], list[float]]:
    keys = [part for t in positions for part in noise_key(seed, 0, Purpose.PLAIN, t)]
    return perturbed_top(logits, [temperature] * len(positions), keys, num_top)


def _agreement(
    engine: Engine, runner: ModelRunner, num_ids: int, outputs: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Ranks of the target's tokens in this model's order, given the same tokens before them."""
    found = []
    for number, output in enumerate(outputs):
        _tell(f"draft: agreement with output {number + 1} of {len(outputs)}")
        tokens, num_prompt = output["prompt"] + output["tokens"][:-1], len(output["prompt"])
        if len(tokens) >= runner.max_model_len:
            continue
        ranks: list[int] = []
        overlaps: list[float] = []
        for positions, logits in _prompt_logits(engine, num_ids, tokens, num_prompt - 1):
            top, _ = _ranked(logits, output["temperature"], output["seed"], positions, min(_NUM_RANKS, num_ids))
            width = len(top) // len(positions)
            for row, t in enumerate(positions):
                wanted, order = output["tokens"][t - num_prompt], top[row * width : (row + 1) * width]
                ranks.append(order.index(wanted) if wanted in order else -1)
                if output["temperature"] > 0:
                    overlaps.append(_overlap(logits[row], output["temperature"], output["top"][t - num_prompt]))
        greedy = output["temperature"] == 0
        found.append({
            "temperature": output["temperature"],
            "ranks": ranks,
            "overlaps": [float(rank == 0) for rank in ranks] if greedy else overlaps,
        })  # fmt: skip
    return found


def _prompt_logits(
    engine: Engine, num_ids: int, tokens: Sequence[int], first: int
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield positions and their logits, for all tokens from `first`."""
    seq = engine.add(tokens, num_prompt_tokens=len(tokens), prompt_logits=True, prompt_logits_from=first)
    while seq.num_pending_tokens:
        out = engine.step()
        if out is None:
            raise EngineError("the KV cache has no room for a prompt")
        (item,) = out.items
        skipped = max(0, first - item.start)
        rows = slice(item.rows.start + skipped, item.rows.start + item.num_new_tokens)
        if rows.start < rows.stop:
            at = item.start + skipped + 1
            yield list(range(at, at + rows.stop - rows.start)), out.logits[rows, :num_ids]
    engine.free(seq)


def _overlap(logits: torch.Tensor, temperature: float, target: Sequence[Sequence[float]]) -> float:
    """Sum of min(p, q); q is truncated as in rejection mode, and p is zero beyond the kept tokens."""
    q, ids = torch.softmax(logits / temperature, 0).topk(min(_NUM_SPARSE, len(logits)))
    q = q / q.sum()
    p = dict(zip(target[0], target[1], strict=True))
    return min(1.0, sum(min(share, p.get(token, 0.0)) for token, share in zip(ids.tolist(), q.tolist(), strict=True)))


def _step_ms(
    engine: Engine, runner: ModelRunner, num_ids: int, num_sequences: int, num_rows: int, task: dict[str, Any]
) -> float:
    """Median milliseconds of a step with sampling, for sequences that each verify `num_rows` - 1 draft tokens."""
    _tell(f"steps over {num_sequences} sequences with {num_rows} rows each")
    length = min(CONTEXT, runner.max_model_len // 2)
    sequences = [
        engine.add([(7 * s + i) % num_ids for i in range(length)], num_prompt_tokens=length)
        for s in range(num_sequences)
    ]
    while any(seq.num_pending_tokens for seq in sequences):
        engine.step()
    sampler = Sampler(num_ids, runner.device, native=runner.native_sampling)
    params = SamplingParams(temperature=task["temperature"], seed=1, max_tokens=1)
    contexts = [RowContext(params, length + row, length) for row in range(num_sequences * num_rows)]
    times_s: list[float] = []
    began_s = time.perf_counter()
    for repeat in range(_WARMUP + _REPEATS):
        for seq in sequences:
            engine.append(seq, [repeat])
            seq.tree = TokenTree(range(num_rows - 1)) if num_rows > 1 else None
        _synchronize(runner)
        started_s = time.perf_counter()
        out = engine.step()
        if out is None:
            raise EngineError("the KV cache has no room for the sequences")
        sampler.candidates(out.logits, contexts[: out.logits.shape[0]], task["candidates"])
        _synchronize(runner)
        times_s.append(time.perf_counter() - started_s)
        if len(times_s) > _WARMUP + 2 and time.perf_counter() - began_s > _MOST_S:
            break
    for seq in sequences:
        engine.free(seq)
    return statistics.median(times_s[_WARMUP:]) * 1e3


def _prompt_ms(engine: Engine, runner: ModelRunner, num_ids: int, num_rows: int) -> float:
    """Median milliseconds of a step over `num_rows` tokens of one prompt, without sampling."""
    _tell(f"a prompt's chunk of {num_rows} tokens")
    times_s = []
    for repeat in range(_PROMPT_REPEATS):
        first = _PROMPT_REPEATS * num_rows + repeat  # another one at each length, too: no block of it is cached
        seq = engine.add([(first + 7 * at) % num_ids for at in range(num_rows)], num_prompt_tokens=num_rows)
        started_s = time.perf_counter()
        if engine.step() is None or seq.num_pending_tokens:
            raise EngineError(f"a prompt of {num_rows} tokens does not fit a step")
        _synchronize(runner)
        times_s.append(time.perf_counter() - started_s)
        engine.free(seq)
    return statistics.median(times_s) * 1e3


def _synchronize(runner: ModelRunner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


def _tell(what: str) -> None:
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()


def main() -> None:
    """Do one task; exit with 1 if it fails."""
    task = json.loads(sys.stdin.read())
    try:
        answer = measure(task)
    except (EngineError, ValueError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    raise SystemExit("error" in answer)


if __name__ == "__main__":
    main()
