"""Whether a draft gets a service and cores of its own, or is run by the target in turns with it: measured, and kept.

*Apart*, the draft guesses while the target verifies, on cores of its own; a guess that is not there in time is missed.
*Together*, both models have all cores, one after the other, in one process. Which is faster depends on the machine, the
pair and the load, so both are started and asked the same, once; the answer is kept in a file of the user's cache.
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
from specdec.commands.measuring.served import Load, Pass, Wishes, measure, warm_up
from specdec.commands.up.cluster import Cluster
from specdec.commands.up.plan import LocalPlan, Placement, plan_services
from specdec.engine.checkpoints.files import find_model_files, read_tokenizer

_PLACEMENTS: tuple[Placement, ...] = ("apart", "together")
_TEMPERATURES = (0.0, 1.0)
_LOADS = (Load(concurrency=1), Load(concurrency=4))
_NUM_PROMPTS = 4
_MAX_TOKENS = 96
_MOST_S = 15.0
"""Of one pass; what has come by then is what counts."""
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Choice:
    """What was found for a pair here."""

    placement: Placement
    tokens_per_s: Mapping[str, float]
    """By placement, while decoding: geometric mean over temperatures 0 and 1, one and four requests at once."""
    is_new: bool
    """Measured now, and not before."""

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {value:.0f}" for name, value in self.tokens_per_s.items())
        when = "" if self.is_new else " before"
        return f"{self.placement} (tokens/s measured here{when}: {figures})"


def choose_placement(plan: LocalPlan, tell: Callable[[str], None], cache: Path | None = None) -> Choice:
    """Return what is faster for a plan of one target and one draft, both on CPU; measures it the first time.

    `tell` is called with what is going on. Where too little comes in time to compare, it is apart, and not remembered.

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
        tell("too few tokens came to tell which is faster")
        return Choice("apart", speeds, is_new=True)
    choice = Choice(max(_PLACEMENTS, key=lambda name: speeds[name]), speeds, is_new=True)
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
            wishes = Wishes(
                prompts=prompts,
                sampling=Sampling(temperature=temperature, max_tokens=_MAX_TOKENS, verify_mode=None),
                loads=_LOADS,
                speculation=(True,),
                repeats=1,
                num_requests=_NUM_PROMPTS,
            )
            speeds += asyncio.run(_measure(cluster.address, wishes, say))
    return math.exp(sum(map(math.log, speeds)) / len(speeds)) if all(speeds) else 0.0


async def _measure(address: str, wishes: Wishes, tell: Callable[[str], None]) -> list[float]:
    settings = ClientSettings(timeout_s=_TIMEOUT_S)
    await warm_up(address, settings, wishes)
    speeds = []
    for load in wishes.loads:
        passes: list[Pass] = []
        try:
            async with asyncio.timeout(_MOST_S):
                await measure(address, settings, dataclasses.replace(wishes, loads=[load]), passes, tell)
        except TimeoutError:
            pass
        gaps_s = [gap for stream in passes[0].streams for gap in stream.gaps_s]
        # Of the decoding alone: prompts take the same however a draft is placed.
        speeds.append(load.concurrency * len(gaps_s) / sum(gaps_s) if gaps_s else 0.0)
    return speeds


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdec" / "placement"


def _key(plan: LocalPlan) -> str:
    """Of what the answer depends on: models, settings, cores, this version."""
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
    """A model's name, and its files' sizes and times, where it is a folder."""
    files = sorted(path for path in Path(model).glob("*") if path.is_file()) if Path(model).is_dir() else []
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return [str(Path(model).resolve()) if files else model, *facts]


def _read(file: Path) -> Choice | None:
    try:
        content = json.loads(file.read_text())
        placement, speeds = content["placement"], content["tokens_per_s"]
        if placement in _PLACEMENTS:
            return Choice(placement, {str(name): float(speed) for name, speed in speeds.items()}, is_new=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None
