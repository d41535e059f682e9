"""What heads offer while sessions run is what their formulas give for the whole text, computed afresh.

So the hidden states are those of the right layers and tokens, entries lie where they are read, those of drafted tokens
are overwritten, and positions are right: a mistake in any of these would cost acceptance and show nowhere else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.config.drafter_options import (
    DFlashOptions,
    DSparkOptions,
    Eagle3Options,
    EagleOptions,
    HeadOptions,
    MedusaOptions,
    MtpOptions,
    PEagleOptions,
    PredictionOptions,
)
from specdec.drafting.heads.methods.dflash import DFlash
from specdec.drafting.heads.methods.dspark import DSpark
from specdec.drafting.heads.methods.medusa import Medusa
from specdec.drafting.heads.methods.peagle import PEagle
from specdec.drafting.heads.parts import dense_attention
from specdec.drafting.heads.serial import SerialHead
from specdec.drafting.heads.session import Head, HeadAsk
from specdec.drafting.interface import Offer
from specdec.engine.tap import FINAL
from specdec.target_service.pacing.expectations import Expectations
from tests.support.engine.local_pair import MODELS, LocalPair, open_session, prompts
from tests.support.heads import checkpoints
from tests.support.heads.checkpoints import Sizes
from tests.support.heads.replayed import replayed_heads
from tests.unit.drafting.heads.dense import block_logits, chain_logits, rollout_logits, spark_logits

FEW = Sizes(vocab=4096, target=384, draft=700)
AS_WIDE = Sizes(vocab=4096, target=384, width=384)
TOP_K = 3
SLACK = 1e-3
"""Logits that differ by less may change places."""
HEADS: dict[str, tuple[type[HeadOptions], Callable[[], tuple[dict[str, Any], checkpoints.Tensors]]]] = {
    "medusa": (MedusaOptions, lambda: checkpoints.old_medusa(FEW)),
    "eagle": (EagleOptions, lambda: checkpoints.eagle(AS_WIDE)),
    "eagle3": (Eagle3Options, lambda: checkpoints.eagle3(FEW, eagle_aux_hidden_state_layer_ids=[2, 5, 7])),
    "eagle3.1": (
        Eagle3Options,
        lambda: checkpoints.eagle3(FEW, fc_norm=True, norm_output=True, num_layers=2, norm_before_residual=True),
    ),
    "mtp": (MtpOptions, lambda: checkpoints.mtp(AS_WIDE)),
    "peagle": (PEagleOptions, lambda: checkpoints.peagle(FEW)),
    "dflash": (DFlashOptions, lambda: checkpoints.dflash(FEW)),
    "dspark": (DSparkOptions, lambda: checkpoints.dspark(FEW, kind="rnn")),
}


@pytest.fixture(scope="module")
def pair() -> LocalPair:
    return LocalPair(max_draft_tokens=16, max_batch_tokens=24)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()


def reference(head: Head, taps: torch.Tensor, tokens: list[int], path: Sequence[int]) -> torch.Tensor:
    """Logits [V] of the token after some drafted ones; `taps` [n - 1, layers, Ht] of committed tokens but the last."""
    if isinstance(head, SerialHead):
        logits = chain_logits(head.model, taps, [*tokens[1:], *path], dense_attention)
        return head.vocabulary.spread(logits[None])[0]
    if isinstance(head, PEagle):
        return head.vocabulary.spread(rollout_logits(head, taps, tokens[1:], len(path))[None])[0]
    if isinstance(head, DSpark):
        return head.vocabulary.spread(spark_logits(head, taps, tokens[-1], path)[None])[0]
    if isinstance(head, DFlash):
        return head.vocabulary.spread(block_logits(head, taps, tokens[-1])[1 + len(path)][None])[0]
    assert isinstance(head, Medusa)
    return head._vocabulary.spread(head.model.logits(taps[-1])[0, len(path)][None])[0]


def taps_of(head: Any, model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Hidden states [n, layers, Ht] of a pass over a whole text; those of its beginnings are their own."""
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.stack([states[-1 if i == FINAL else i][0] for i in head.layer_ids], dim=1)


def check(head: Any, all_taps: torch.Tensor, tokens: list[int], offer: Offer) -> int:
    """Hold every node of an offer against a pass over the whole text; returns after how many of them others follow."""
    taps = all_taps[: len(tokens) - 1]
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(offer.token_ids, offer.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    parents = {path[:-1] for path in paths}
    for above in parents:
        logits = reference(head, taps, tokens, above)
        least = float(logits.topk(TOP_K).values[-1]) - SLACK
        assert all(float(logits[path[-1]]) >= least for path in paths if path[:-1] == above)
    return len(parents)


@pytest.mark.parametrize(
    ("name", "is_replayed"),
    [*((name, False) for name in HEADS), ("eagle3.1", True), ("mtp", True), ("peagle", True), ("dflash", True)],
)
@torch.inference_mode()
def test_offers_are_those_of_the_whole_text_computed_afresh(
    name: str,
    is_replayed: bool,
    pair: LocalPair,
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Expectations, "is_worth_asking", lambda *_: True)  # whatever the clock says
    captures = replayed_heads(monkeypatch) if is_replayed else None
    kind, make = HEADS[name]
    more = {"topk": TOP_K} if kind is MedusaOptions else {"speculative_eagle_topk": TOP_K}
    options = kind(model=str(checkpoints.save(tmp_path, *make())), **more)  # type: ignore[call-arg]
    pair.reset()
    opens = {
        str(i): open_session(prompts()[i][:length], max_tokens=30, ignore_eos=True, body={"cache_salt": name.encode()})
        for i, length in enumerate((33, 50, 20))
    }
    plain = pair.run(opens, use_draft=False)
    # What the output will be, now and then wrong: several nodes of a step are accepted, and some are not.
    rng = random.Random(1)
    for key, body in opens.items():
        body.prediction_token_ids.extend(
            token if rng.random() < 0.8 else rng.randrange(4096) for token in plain[key].token_ids
        )
        body.cache_salt = b""
    pair.reset(drafters=[PredictionOptions(), options])  # type: ignore[list-item]
    head: Any = pair.verifier.local_drafters._drafters[options.method]
    draft = head.draft
    offered: list[tuple[list[int], Offer]] = []

    def kept(asks: Sequence[HeadAsk]) -> list[Offer | None]:
        offers = draft(asks)
        for ask, offer in zip(asks, offers, strict=True):
            assert ask.session.seq is not None
            assert offer is not None
            offered.append((list(ask.session.seq.token_ids), offer))
        return offers

    head.draft = kept
    for _ in range(2):  # the second time prompts are in the prefix cache
        for body in opens.values():
            body.cache_salt = f"{name} {is_replayed}".encode()
        outcomes = pair.run(opens, use_draft=False)
        assert pair.verifier.local_drafters.names == ["prediction", options.method]
        for key, outcome in outcomes.items():
            assert outcome.token_ids == plain[key].token_ids
            assert outcome.num_of("prediction", "num_accepted") > 5
    texts = [[*body.token_ids, *plain[key].token_ids] for key, body in opens.items()]
    taps = [taps_of(head, model, text) for text in texts]
    num_checked = 0
    for tokens, offer in offered:
        [of_text] = [known for known, text in zip(taps, texts, strict=True) if text[: len(tokens)] == tokens]
        num_checked += check(head, of_text, tokens, offer)
    assert num_checked > 60
    if captures is not None:
        assert captures.num_replayed > 20
    assert all(outcome.verdicts[0].num_cached_tokens > 0 for key, outcome in outcomes.items() if key != "2")
