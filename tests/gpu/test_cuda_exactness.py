"""The product's promise on a CUDA device. The same checks run on CPU in tests/unit; here they meet CUDA's kernels."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from specdec.engine.sampling.noise import Purpose, gumbel, hash_u32, noise_key
from specdec.engine.sampling.sampler import Sampler
from tests.support.engine.extreme_rows import Batch, batches
from tests.support.engine.local_pair import LocalPair, open_session
from tests.support.engine.outcomes import Outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROMPT = [0, 311, 290, 1033, 287, 405, 3001, 17, 942, 77, 12, 2049, 333, 18, 1200, 6]
FLOAT32_FLIPS = 0.001
"""Near-ties between batch shapes, as a share of tokens: float32 about 1e-5, with room for a small sample."""
BFLOAT16_FLIPS = 0.05
"""bfloat16 may flip about 1 % of tokens between batch shapes."""


def _pair(dtype: str) -> LocalPair:
    return LocalPair(device="cuda:0", dtype=dtype)


def _share_that_differs(runs: list[tuple[Outcome, Outcome]]) -> float:
    """Share of positions up to and including a pair's first difference at which the pair differs."""
    compared = different = 0
    for first, second in runs:
        for a, b in zip(first.token_ids, second.token_ids, strict=False):
            compared += 1
            if a != b:
                different += 1
                break
    return different / max(compared, 1)


def test_hash_is_identical_on_cpu_and_cuda() -> None:
    keys = torch.tensor([noise_key(seed, 0, Purpose.PLAIN, t) for seed in (0, 7, 2**64 - 1) for t in range(8)])
    ids = torch.arange(50_000)
    assert torch.equal(hash_u32(keys, ids), hash_u32(keys.cuda(), ids.cuda()).cpu())


def test_noise_on_cuda_is_that_of_the_cpu_but_for_at_most_one_last_bit() -> None:
    """Two libraries' float64 logarithms may round apart; rounding to float32 hides nearly all of it."""
    keys = torch.tensor([noise_key(3, 1, Purpose.PLAIN, t) for t in range(32)])
    ids = torch.arange(100_000)
    on_cpu, on_cuda = gumbel(keys, ids), gumbel(keys.cuda(), ids.cuda()).cpu()
    assert torch.isfinite(on_cuda).all()
    apart = on_cpu != on_cuda
    assert apart.sum().item() <= 1, "two CPU libraries differ in 15 of all 2^32 values: one here is chance, two are not"
    assert ((on_cpu - on_cuda).abs()[apart] <= torch.finfo(torch.float32).eps * on_cpu.abs()[apart]).all()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=batches())
def test_rows_that_are_not_finite_give_no_token_on_cuda_either_and_harm_no_other(batch: Batch) -> None:
    on_cpu, on_cuda = Sampler(batch.vocab_size, "cpu", native="off"), Sampler(batch.vocab_size, "cuda:0")
    logits = batch.logits.cuda()
    is_bad = [token is None for token in on_cpu.sample(batch.logits, batch.rows)]
    assert [token is None for token in on_cuda.sample(logits, batch.rows)] == is_bad
    assert [not found for found in on_cuda.candidates(logits, batch.rows, 3)] == is_bad
    assert [sample is None for sample in on_cuda.draft_sample(logits, batch.rows)] == is_bad
    assert on_cuda.probs(logits, batch.rows).isnan().any(dim=1).tolist() == is_bad


@pytest.mark.parametrize(("dtype", "flips"), [("float32", FLOAT32_FLIPS), ("bfloat16", BFLOAT16_FLIPS)])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_with_speculation_equal_tokens_without_up_to_near_ties(
    dtype: str, flips: float, temperature: float
) -> None:
    pair = _pair(dtype)
    runs = []
    for seed in range(12):
        body = open_session(PROMPT[: 4 + seed], temperature=temperature, seed=seed, max_tokens=64, ignore_eos=True)
        plain = pair.run({"s": body}, use_draft=False)["s"]
        pair.reset()
        fast = pair.run({"s": body}, rng=random.Random(seed))["s"]
        pair.reset()
        assert fast.num_accepted > 0
        runs.append((plain, fast))
    assert _share_that_differs(runs) <= flips


def test_eight_sessions_at_once_equal_each_alone_up_to_near_ties_in_float32() -> None:
    pair = _pair("float32")
    bodies = {
        f"s{i}": open_session(PROMPT[: 3 + i], temperature=1.0, seed=i, max_tokens=48, ignore_eos=True)
        for i in range(8)
    }
    together = pair.run(bodies)
    pair.reset()
    runs = []
    for name, body in bodies.items():
        runs.append((pair.run({name: body}, use_draft=False)[name], together[name]))
        pair.reset()
    assert _share_that_differs(runs) <= FLOAT32_FLIPS


def test_steps_that_nobody_waits_for_give_the_tokens_of_steps_that_are_waited_for() -> None:
    pair = _pair("float32")
    engine = pair.target_built.engine
    assert engine.launch_pass is not None
    bodies = {
        f"s{i}": open_session(PROMPT[: 3 + i], temperature=1.0, seed=i, max_tokens=48, ignore_eos=True)
        for i in range(8)
    }
    launched = pair.run(bodies, use_draft=False)
    pair.reset()
    engine.launch_pass = None
    computed = pair.run(bodies, use_draft=False)
    assert _share_that_differs([(computed[name], launched[name]) for name in bodies]) <= FLOAT32_FLIPS
