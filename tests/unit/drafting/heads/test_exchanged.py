"""A head that is exchanged leaves its memory at once: nothing waits for somebody to look for cycles."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.config.drafter_options import (
    DFlashOptions,
    DSparkOptions,
    Eagle3Options,
    EagleOptions,
    HeadOptions,
    MedusaOptions,
    PEagleOptions,
)
from specdec.drafting.heads.methods.registry import load_head
from specdec.drafting.heads.target import HeadTarget
from tests.support.heads import checkpoints
from tests.support.heads.checkpoints import Sizes
from tests.support.heads.targets import fixture_target

SIZES = Sizes(vocab=40, target=16, width=16, draft=20)
HEADS: dict[str, tuple[type[HeadOptions], Callable[[], tuple[dict[str, Any], checkpoints.Tensors]], tuple[int, ...]]]
HEADS = {
    "medusa": (MedusaOptions, lambda: checkpoints.old_medusa(SIZES), ()),
    "eagle": (EagleOptions, lambda: checkpoints.eagle(Sizes(vocab=40, target=16, width=16)), ()),
    "eagle3": (Eagle3Options, lambda: checkpoints.eagle3(SIZES), (1, 2, 3)),
    "peagle": (PEagleOptions, lambda: checkpoints.peagle(SIZES), (1, 2, 3)),
    "dflash": (DFlashOptions, lambda: checkpoints.dflash(SIZES), (1, 2)),
    "dspark": (DSparkOptions, lambda: checkpoints.dspark(SIZES), (1, 2)),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> HeadTarget:
    return fixture_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def no_cycles_are_found() -> Iterator[None]:
    """As in an engine, which freezes what there is at its start."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_cycles_are_found")
@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_nobody_asks_any_more_is_gone(name: str, target: HeadTarget, tmp_path: Path) -> None:
    kind, make, layer_ids = HEADS[name]
    more = {"layer_ids": layer_ids} if layer_ids else {}
    head: Any = load_head(kind(model=str(checkpoints.save(tmp_path, *make())), **more), target)  # type: ignore[arg-type]
    parts = [head, head.model, *([head.cache] if hasattr(head, "cache") else [])]
    left = [weakref.ref(part) for part in parts]
    del head, parts
    assert [ref() for ref in left] == [None] * len(left)
