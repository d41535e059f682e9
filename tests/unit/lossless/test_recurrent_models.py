"""Targets and drafts with recurrent layers: speculation, lost replicas, forks and preemption change no token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specdec.config.drafter_options import LookaheadOptions, NgramOptions, PredictionOptions, SuffixOptions
from specdec.v1 import common_pb2 as pb
from tests.support.engine.architectures import make_pair, save_pair
from tests.support.engine.local_pair import LocalPair, open_session
from tests.support.engine.outcomes import Outcome
from tests.support.engine.recurrent_models import RECURRENT
from tests.support.engine.rejection import REJECTION
from tests.support.for_each import for_each
from tests.unit.lossless.sessions import salts

FAMILIES = ("qwen3_next", "nemotron_h", "mamba", "lfm2")
DRAFTERS = [NgramOptions(prompt_lookup_min=1), SuffixOptions(), PredictionOptions(), LookaheadOptions()]
NUM_TOKENS = 14
TEMPERATURES = (0.0, 0.7, 1.0)
ROOMY: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 40, "block_size": 8}
TIGHT: dict[str, Any] = {"num_blocks": 9, "max_batch_tokens": 16, "max_batch_seqs": 3, "block_size": 8}


def body(number: int, **options: Any) -> pb.OpenSession:
    rng = random.Random(number)
    tokens = [rng.randrange(3, 200) for _ in range(19 + 11 * number)]
    fields = options.pop("body", {})
    return open_session(tokens, max_tokens=NUM_TOKENS, seed=number, ignore_eos=True, **options, body=fields)


def plain_outcomes(pair: LocalPair) -> dict[str, list[int]]:
    """Tokens of each session, alone, without speculation and without cached prefixes."""
    found = {}
    for number, temperature in enumerate(TEMPERATURES):
        alone = body(number, temperature=temperature, body={"speculate": False, "cache_salt": b"%d" % next(salts)})
        found[str(number)] = pair.run({"a": alone}, use_draft=False)["a"].token_ids
    return found


def sessions(**fields: Any) -> dict[str, pb.OpenSession]:
    return {str(n): body(n, temperature=t, body=fields) for n, t in enumerate(TEMPERATURES)}


def assert_same(outcomes: dict[str, Outcome], plain: dict[str, list[int]], how: str) -> int:
    """Compare tokens; returns the number of accepted ones."""
    for key, outcome in outcomes.items():
        assert outcome.error is None, how
        assert outcome.token_ids == plain[key], (how, key)
    return sum(outcome.num_accepted for outcome in outcomes.values())


@for_each("name", FAMILIES)
def test_speculation_replays_and_forks_change_no_token(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    files = save_pair(RECURRENT[name](), tmp_path_factory.mktemp(name), noise=0.001)
    pair = LocalPair(str(files.target), str(files.draft), dict(ROOMY), **ROOMY)
    plain = plain_outcomes(pair)
    assert assert_same(pair.run(sessions()), plain, "a draft's trees") > 0
    assert assert_same(pair.run(sessions()), plain, "cached prefixes") > 0
    assert_same(pair.run(sessions(), rng=random.Random(1)), plain, "lost, late and repeated messages")

    def lose_once(pair: LocalPair) -> None:
        for key in sorted(pair.live):
            if pair.epochs[key] == 1 and pair.num_output(key) >= 4:
                pair.reopen(key)

    assert_same(pair.run(sessions(), each_turn=lose_once), plain, "replay at a new epoch")
    greedy = {"0": body(0, temperature=0.0, verify_mode=REJECTION)}
    assert_same(pair.run(greedy), plain, "rejection")
    forked = {"1": body(1, temperature=0.7), "b": body(1, temperature=0.7, body={"fork_from": "1"})}
    assert_same(pair.run(forked), {**plain, "b": plain["1"]}, "forks")
    pair.reset(own_draft=True)
    assert assert_same(pair.run(sessions()), plain, "a draft in the target's process") > 0
    pair.reset(drafters=DRAFTERS)
    assert_same(pair.run(sessions(), use_draft=False), plain, "n-grams, suffixes, predictions and lookahead")


@for_each("name", ("qwen3_5", "mamba2"))
def test_preemption_changes_no_token(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    files = save_pair(RECURRENT[name](), tmp_path_factory.mktemp(name), noise=0.001)
    pair = LocalPair(str(files.target), str(files.draft), dict(TIGHT), **TIGHT)
    plain = plain_outcomes(pair)
    many = {f"{key}{copy}": one for copy in range(2) for key, one in sessions().items()}
    rng = random.Random(2)

    def preempt(pair: LocalPair) -> None:
        for engine in (pair.target_built.engine, pair.draft_built.engine):
            holders = [seq for seq in engine.scheduler.sequences if seq.block_ids and rng.random() < 0.2]
            for seq in holders:
                engine.scheduler.preempt(seq)

    assert_same(pair.run(many, each_turn=preempt), {key: plain[key[0]] for key in many}, "preemption")
    assert pair.target_built.engine.stats().preemptions > 5


@for_each("name", ("kimi_linear", "falcon_h1"))
def test_a_draft_with_recurrent_layers_serves_a_target_without(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(name)
    target, draft = make_pair("qwen3", folder / "target"), save_pair(RECURRENT[name](), folder / "draft")
    pair = LocalPair(str(target.target), str(draft.draft), dict(ROOMY), **ROOMY)
    outcomes = pair.run(sessions())
    assert_same(outcomes, plain_outcomes(pair), "another draft")
    assert sum(outcome.num_verified for outcome in outcomes.values()) > 0
