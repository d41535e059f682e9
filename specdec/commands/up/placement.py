"""Placement of a draft on CPU, chosen by measurement.

*Apart*, a draft service drafts on its own cores while the target verifies; a late proposal is a miss. *Together*, the
target runs the draft in turns with itself, each on all cores. Which is faster depends on machine, pair and load, so
both run the same requests once; the result is kept in the user's cache.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import specdec
from specdec.client import ClientSettings
from specdec.commands.errors import ClusterFailed
from specdec.commands.measuring.prompts import prompts_for
from specdec.commands.measuring.requests import Sampling
from specdec.commands.measuring.served import Load, LoadPlan, LoadRun, measure, warm_up
from specdec.commands.up.cluster import Cluster
from specdec.commands.up.plan import LocalPlan, Placement, plan_services
from specdec.engine.checkpoints.files import find_model_files, read_tokenizer

_PLACEMENTS: tuple[Placement, ...] = ("apart", "together")
_TEMPERATURES = (0.0, 1.0)
_LOADS = (Load(concurrency=1), Load(concurrency=4))
_NUM_PROMPTS = 4
_MAX_TOKENS = 96
_MOST_S = 15.0
"""Seconds of one pass; tokens that come later do not count."""
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class PlacementChoice:
    """The result for a pair on this machine."""

    placement: Placement
    tokens_per_s: Mapping[str, float]
    """Decoding speed by placement: geometric mean over temperatures 0 and 1, one and four requests at once."""
    is_new: bool
    """Whether it was measured now and not read from the cache."""

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {value:.0f}" for name, value in self.tokens_per_s.items())
        when = "" if self.is_new else " before"
        return f"{self.placement} (tokens/s measured here{when}: {figures})"


def choose_placement(plan: LocalPlan, tell: Callable[[str], None], cache: Path | None = None) -> PlacementChoice:
    """Return the faster placement of one target and one draft on CPU, measured the first time.

    `tell` is called with the progress. If too few tokens come in time, the choice is apart and is not kept.

    Raises ClusterFailed and the typed errors of `specdec.wire.errors`.
    """
    file = (cache or _cache()) / f"{_key(plan)}.json"
    known = _read(file)
    if known is not None:
        return known
    speeds: dict[str, float] = {}
    for name in _PLACEMENTS:
        speeds[name] = _speed(dataclasses.replace(plan, placement=name), tell)
    if not all(speeds.values()):
        tell("too few tokens to compare the placements")
        return PlacementChoice("apart", speeds, is_new=True)
    choice = PlacementChoice(max(_PLACEMENTS, key=lambda name: speeds[name]), speeds, is_new=True)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"placement": choice.placement, "tokens_per_s": speeds}, indent=1) + "\n")
    except OSError as error:
        tell(f"{file} cannot be written ({error.strerror}): it is measured again the next time")
    return choice


def _speed(plan: LocalPlan, tell: Callable[[str], None]) -> float:
    def say(what: str) -> None:
        tell(f"measuring {plan.placement}: {what}")

    trial = dataclasses.replace(plan, free_ports=True, redis_url=None)
    try:
        digest = read_tokenizer(find_model_files(plan.target_model, None)[0]).digest
    except (OSError, ValueError) as error:
        raise ClusterFailed(str(error)) from error
    prompts = prompts_for(digest).prompts[:_NUM_PROMPTS]
    speeds = []
    with Cluster(plan_services(trial)) as cluster:
        cluster.start(lambda what: say(f"waiting for {what}"))
        for temperature in _TEMPERATURES:
            wishes = LoadPlan(
                prompts=prompts,
                sampling=Sampling(temperature=temperature, max_tokens=_MAX_TOKENS, verify_mode=None),
                loads=_LOADS,
                speculation=(True,),
                repeats=1,
                num_requests=_NUM_PROMPTS,
            )
            speeds += asyncio.run(_measure(cluster.address, wishes, say))
    return math.exp(sum(map(math.log, speeds)) / len(speeds)) if all(speeds) else 0.0


async def _measure(address: str, wishes: LoadPlan, tell: Callable[[str], None]) -> list[float]:
    settings = ClientSettings(timeout_s=_TIMEOUT_S)
    await warm_up(address, settings, wishes)
    speeds = []
    for load in wishes.loads:
        passes: list[LoadRun] = []
        try:
            async with asyncio.timeout(_MOST_S):
                await measure(address, settings, dataclasses.replace(wishes, loads=[load]), passes, tell)
        except TimeoutError:
            pass
        gaps_s = [gap for stream in passes[0].streams for gap in stream.gaps_s]
        # Only decoding counts: the placement does not change the time of prompts.
        speeds.append(load.concurrency * len(gaps_s) / sum(gaps_s) if gaps_s else 0.0)
    return speeds


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec" / "placement"


def _key(plan: LocalPlan) -> str:
    """Digest of models, settings, cores and version, on which the result depends."""
    parts = [
        specdec.__version__,
        platform.node(),
        platform.processor(),
        sorted(os.sched_getaffinity(0)),
        [_files(model) for model in (plan.target_model, plan.draft_model)],
        sorted(map(str, plan.target_settings.items())),
        sorted(map(str, plan.draft_settings.items())),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _files(model: str) -> list[object]:
    """A model's name and, if it is a folder, its files' sizes and times."""
    files = sorted(path for path in Path(model).glob("*") if path.is_file()) if Path(model).is_dir() else []
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return [str(Path(model).resolve()) if files else model, *facts]


def _read(file: Path) -> PlacementChoice | None:
    try:
        content = json.loads(file.read_text())
        placement, speeds = content["placement"], content["tokens_per_s"]
        if placement in _PLACEMENTS:
            return PlacementChoice(placement, {str(name): float(speed) for name, speed in speeds.items()}, is_new=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None
