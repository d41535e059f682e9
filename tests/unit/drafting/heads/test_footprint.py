"""What is set aside for heads before they are loaded is no less than what they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from specdec.config import DraftSettings, TargetSettings
from specdec.config.drafter_options import DFlashOptions, Eagle3Options, EagleOptions, HeadOptions, MedusaOptions
from specdec.drafting.heads.footprint import footprint
from specdec.drafting.heads.methods.registry import load_head
from specdec.drafting.heads.target import HeadTarget
from specdec.engine.cuda.passes import CAPTURE_BYTES
from specdec.engine.errors import ModelLoadError
from specdec.engine.model.kv_budget import NOTHING, Beside
from specdec.engine.model.runner import ModelRunner
from specdec.replica.worker.build import build_engine
from specdec.target_service.proposals.own_draft import build_own_draft
from tests.support.heads import checkpoints
from tests.support.heads.checkpoints import Sizes, Tensors
from tests.support.heads.targets import fixture_target

SIZES = Sizes(vocab=40, target=16, width=16, draft=20)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> HeadTarget:
    return fixture_target(tmp_path_factory.mktemp("target"))


def without(kept: tuple[dict[str, Any], Tensors], *names: str) -> tuple[dict[str, Any], Tensors]:
    for name in names:
        del kept[1][name]
    return kept


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (MedusaOptions, lambda: checkpoints.old_medusa(SIZES)),
        (EagleOptions, lambda: checkpoints.eagle(Sizes(vocab=40, target=16, width=16))),
        (Eagle3Options, lambda: without(checkpoints.eagle3(SIZES), "embed_tokens.weight")),
        (Eagle3Options, lambda: checkpoints.eagle3(SIZES, num_layers=2)),
        (DFlashOptions, lambda: checkpoints.dflash(SIZES)),
    ],
    ids=["medusa", "eagle", "eagle3 that shares its embedding", "eagle3 of two layers", "dflash"],
)
def test_a_head_takes_what_was_set_aside_for_it(
    kind: type[HeadOptions],
    make: Callable[[], tuple[dict[str, Any], Tensors]],
    target: HeadTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HeadTarget, "place", lambda self, module: None)  # a CPU's kernels pack weights
    more = {} if kind is MedusaOptions else {"layer_ids": (1, 2, 3)}
    if kind is DFlashOptions:
        more = {"layer_ids": (1, 2)}
    options = kind(model=str(checkpoints.save(tmp_path, *make())), **more)  # type: ignore[arg-type]
    aside = footprint([options])
    head: Any = load_head(options, target)
    taken = sum(parameter.numel() * parameter.element_size() for parameter in head.model.parameters())
    told = aside.weight_bytes(40, 16, torch.float32)
    assert taken <= told <= 1.5 * taken + 10_000, "headers of files are small"
    cache = getattr(head, "cache", None)
    num_slots = 0 if cache is None else (cache.spare_block + 1) * cache.block_size
    assert aside.elements_per_token * num_slots * 4 == (0 if cache is None else cache.num_bytes)


def test_several_heads_add_up_and_files_that_are_none_count_for_nothing(tmp_path: Path) -> None:
    one = Eagle3Options(model=str(checkpoints.save(tmp_path / "a", *checkpoints.eagle3(SIZES))))
    other = EagleOptions(model=str(tmp_path / "missing"))
    assert footprint([]) is None
    assert footprint([other]) == NOTHING
    twice, once = footprint([one, other, one]), footprint([one])
    assert once is not None
    assert twice == Beside(2 * once.num_bytes, 2 * once.num_embeddings, 2 * once.elements_per_token)


def test_a_draft_in_the_same_process_leaves_to_heads_what_was_set_aside(
    target: HeadTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded before them, and would have its KV cache take all that the target's has left."""
    option = Eagle3Options(model=str(checkpoints.save(tmp_path, *checkpoints.eagle3(SIZES))), layer_ids=(1, 2, 3))
    settings = TargetSettings(model=target.runner.settings.model, drafters=(option,), num_blocks=64, block_size=8)
    built = build_engine(settings, heads=footprint(settings.drafters))
    monkeypatch.setattr(HeadTarget, "place", lambda self, module: None)
    head: Any = load_head(option, target)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in head.model.parameters())
    of_tokens = head.cache.num_bytes * 64 // (head.cache.spare_block + 1)  # what is drafted lies in slots beside theirs
    assert CAPTURE_BYTES + weights + of_tokens <= built.awaited_bytes
    asked: list[Beside] = []

    def load(settings: object, group: object, beside: Beside) -> None:
        asked.append(beside)
        raise ModelLoadError("that is enough")

    monkeypatch.setattr(ModelRunner, "load", load)
    with pytest.raises(ModelLoadError, match="that is enough"):
        build_own_draft(cast(Any, None), built, DraftSettings(model=settings.model), cast(Any, None))
    assert asked == [Beside(built.awaited_bytes)]
