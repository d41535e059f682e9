"""Steps with engines in their own process: they compare results with others', and measure times."""

from __future__ import annotations

from array import array
from functools import partial

import torch
from triton.testing import do_bench

from bench.gpu_slot.aims import COPIES
from bench.gpu_slot.place import WRONG, Found, Place
from bench.shaped import engine_of, rows_of, time_steps
from specdec.engine.cuda.sampling import launch_top, row_parameters
from specdec.engine.drawing.device import DeviceDrawing
from specdec.engine.drawing.rows import DrawRow, DrawRule
from specdec.engine.model.runner import ModelRunner
from specdec.engine.sampling.logit_processors import RowContext
from specdec.engine.sampling.sampler import Sampler
from specdec.engine.sampling.token_history import TokenHistory
from specdec.wire.sampling_params import SamplingParams

_DEVICE = torch.device("cuda:0")
_CONTROLS: tuple[Found, ...] = (
    {},
    {"top_k": 40, "top_p": 0.9},
    {"min_p": 0.05, "repetition_penalty": 1.05, "frequency_penalty": 0.3},
    {"logit_bias": {7: 2.0, 2999: -100.0}, "min_tokens": 900, "eos_token_ids": (2,)},
)
_GEMMA: Found = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 700, "head_dim": 256,
          "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
_GPT_OSS: Found = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": 128,
            "num_local_experts": 4, "num_experts_per_tok": 2,
            "experts_implementation": "batched_mm"}  # fmt: skip
_FEW: Found = {"num_hidden_layers": 2, "vocab_size": 512}
_KINDS: dict[str, Found] = {"heads of 128": {"head_dim": 128}, "soft caps, windows": _GEMMA, "sinks": _GPT_OSS}


def graph(place: Place) -> Found:
    """Logits that differ between replays and eager steps. A replay that waits for the device fails the step."""
    runner, context = place.runner("llama-1b", place.sized(2048, 96)), place.sized(1024, 40)
    assert runner.replayed is not None
    replays, cache = runner.replayed
    runner.forward(rows_of(runner, 0, context)[0])
    found: Found = {"captured steps": runner.num_graphs}
    for num_rows in place.sized((1, 8, 64), (1, 4)):  # whole buckets: products over padded rows may differ
        batch, _ = rows_of(runner, context - num_rows, num_rows)
        torch.cuda.set_sync_debug_mode("error")
        replayed = replays(batch, cache).clone()
        torch.cuda.set_sync_debug_mode("default")
        found[f"{WRONG}logits of {num_rows} replayed rows"] = int((replayed != replays.forward(batch, cache)).sum())
        place.keep(found)
    return found


def exactness(place: Place) -> Found:
    """Tokens and scores that differ between the device's sampling and the CPU's, with all controls."""
    num_rows, vocab_size = place.sized((64, 128256), (12, 3000))
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    history, rows = TokenHistory(list(range(0, 2000, 2))), []
    for row in range(num_rows):
        controls = {"temperature": (0.0, 0.7, 1.0)[row % 3], **_CONTROLS[row % len(_CONTROLS)]}
        params = SamplingParams(seed=row, max_tokens=999, **controls)
        rows.append(RowContext(params, 1000, 1000, history))
    wanted = Sampler(vocab_size, "cpu").candidates(logits, rows, 4)
    drawn = Sampler(vocab_size, _DEVICE).candidates(logits.to(_DEVICE), rows, 4)
    pairs = [(a, b) for of_row in zip(wanted, drawn, strict=True) for a, b in zip(*of_row, strict=True)]
    found: Found = {"tokens": len(pairs), f"{WRONG}tokens": sum(a.token_id != b.token_id for a, b in pairs)}
    return found | {"scores that differ": sum(a.score != b.score for a, b in pairs)}


def attention(place: Place) -> Found:
    """Numerics ids of models with each kind of attention, which have proved their logits at load, after 2,100 tokens
    and in trees as well, against torch's attention."""
    return _proved(place, _KINDS, ("float32", "float16", "bfloat16"), (False,))


def selftest(place: Place) -> Found:
    """The same of a model of Llama's shape, in each dtype, fast and deterministic."""
    return _proved(place, {"": {}}, ("float32", "float16", "bfloat16"), (False, True))


def _proved(place: Place, kinds: dict[str, Found], dtypes: tuple[str, ...], deterministic: tuple[bool, ...]) -> Found:
    found: Found = {}
    for kind, more in kinds.items():
        for dtype in place.sized(dtypes, dtypes[:1]):
            for is_deterministic in deterministic:
                settings = {"dtype": dtype, "deterministic": is_deterministic, "self_test": True}
                runner = place.runner("llama-1b", place.sized(4096, 96), {**_FEW, **more}, **settings)
                found[f"{dtype} {kind}{', deterministic' if is_deterministic else ''}"] = runner.numerics_id
                place.keep(found)
    return found


def bitwise(place: Place) -> Found:
    """Rows whose logits change when their tokens are computed in other numbers, or in a tree."""
    found: Found = {}
    for shape, length in place.sized((("llama-1b", 1536), ("llama-8b", 4608)), (("llama-1b", 40),)):
        for kind in ("fast", "deterministic"):
            runner = place.runner(shape, length + 64, deterministic=kind == "deterministic")
            # The interpreter's products depend on the number of rows.
            label = f"{WRONG if kind == 'deterministic' and not place.dry else ''}{kind} rows of {shape}"
            most, other = place.sized((512, 384), (24, 10))
            whole, cut, first = _prefilled(runner, length, most), _prefilled(runner, length, other), length - most
            found[f"{label}, prompts in chunks of {other}"] = int((cut != whole[-len(cut) :]).any(1).sum())
            for num_rows in place.sized((1, 2, 7, 8, 16, 64), (1, 3, 4)):
                starts = range(first, length - num_rows + 1, max(num_rows, most // 8))
                for is_tree in (False, True):
                    differing = 0
                    for start in starts[-1:] if is_tree else starts:  # a tree writes over what follows
                        batch, chain = rows_of(runner, start, num_rows, is_tree=is_tree)
                        expected = whole[start - first :][: len(chain)]
                        differing += int((runner.forward(batch)[chain] != expected).any(1).sum())
                    found[f"{label}, {num_rows} {'in a tree' if is_tree else 'at once'}"] = differing
                    place.keep(found)
    return found


def _prefilled(runner: ModelRunner, length: int, chunk: int) -> torch.Tensor:
    """Logits of the last chunk of a sequence, of which only the first may be shorter."""
    starts = range(length % chunk - chunk if length % chunk else 0, length, chunk)
    return [runner.forward(rows_of(runner, max(0, at), at + chunk - max(0, at))[0]) for at in starts][-1]


def steps(place: Place) -> Found:
    """Times of steps of 8B and 1B shapes at several contexts, and of device work that is bound by memory."""
    source = torch.empty(place.sized(1 << 30, 1 << 20), dtype=torch.uint8, device=_DEVICE)
    target, timed = torch.empty_like(source), place.sized(do_bench, place.median_ms)
    found: Found = {COPIES: round(2 * source.nbytes / timed(partial(target.copy_, source)) / 1e9, 3)}
    logits = torch.randn(8, place.sized(128256, 3000), device=_DEVICE)
    parameters = row_parameters([1.0] * 8, list(range(16))).to(_DEVICE)
    found["sampling of 8 rows of 128k, ms"] = timed(lambda: launch_top(logits, parameters, 4))
    del source, target
    short, *contexts = place.sized((8, 1024, 4096), (8, 40))
    for name in ("1b", "8b", "8b deterministic"):
        runner = place.runner(f"llama-{name[:2]}", contexts[-1] + 512, deterministic="deterministic" in name)
        engine = engine_of(runner)
        for context in (short, *contexts):
            for num_rows in place.sized((1, 8, 64), (1, 4)):
                step_ms, prefill_ms = time_steps(engine, [context], num_rows - 1)
                found[f"{name}: {num_rows} rows at {context}, ms"] = round(step_ms, 4)
                found[f"{name}: prompt of {context}, ms"] = round(prefill_ms, 2)
            place.keep(found)
        assert runner.replayed is not None
        batch, (replays, cache) = rows_of(runner, contexts[0], place.sized(8, 4))[0], runner.replayed
        found[f"{name}: 8 rows at {contexts[0]}, eager, ms"] = place.median_ms(partial(replays.forward, batch, cache))
        del runner, engine, replays, cache
    if not place.dry:
        tree = "{}: 8 rows at {}, ms"
        found["8b: 64 rows over 1 row"] = found["8b: 64 rows at 1024, ms"] / found["8b: 1 rows at 1024, ms"]
        found["8b: what 4k add to 8 rows, ms"] = found[tree.format("8b", 4096)] - found[tree.format("8b", short)]
        ordered = found[tree.format("8b deterministic", 1024)]
        found["8b: deterministic over fast, speed"] = found[tree.format("8b", 1024)] / ordered
    return found


def long(place: Place) -> Found:
    """Times of an 8B prompt of 32k tokens, and of decoding one long context beside 31 short ones."""
    length, short, num_rows = place.sized((32768, 500, 32), (60, 8, 4))
    num_blocks = (length + num_rows * (short + 64)) // 16 + 2 * num_rows
    engine = engine_of(place.runner("llama-8b", length + 64, num_blocks=num_blocks))
    found: Found = {}
    for name, first in ((f"one of {length}", length), ("short ones only", short)):
        step_ms, prefill_ms = time_steps(engine, [first] + [short] * (num_rows - 1))
        found[f"8b: {num_rows} contexts, {name}, ms"], found[f"8b: prompts, {name}, ms"] = step_ms, prefill_ms
        place.keep(found)
    return found


def draft(place: Place) -> Found:
    """Milliseconds of drafting eight tokens in one graph: the first is drawn from logits that are there."""
    context, num_tokens = place.sized((1024, 8), (16, 3))
    runner = place.runner("llama-1b", place.sized(2048, 96))
    assert runner.replayed is not None
    sampler = Sampler(runner.vocab_size, _DEVICE)
    drawing = DeviceDrawing(*runner.replayed, runner.vocab_size, runner.max_model_len, sampler)
    rule = DrawRule(SamplingParams(seed=1, max_tokens=99, temperature=1.0))
    row = DrawRow(rule, 0, context + 1, num_tokens, array("i", range(runner.max_model_len // runner.block_size)))
    logits = runner.forward(rows_of(runner, context, 1)[0])
    drawn = drawing.draw([row], logits, 2)[0]
    found: Found = {"8 tokens, ms": place.median_ms(lambda: drawing.draw([row], logits, 2))}
    return found | {f"{WRONG}tokens that are missing": num_tokens - len(drawn)}
