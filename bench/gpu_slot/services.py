"""Steps that run all services: each a command of its own, whose report is kept."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.gpu_slot.models import Found, Place


def served(place: Place) -> Found:
    """The demo: the shipped pair behind all three services, compared with plain decoding."""
    return _told("specdec.cli.main", "demo")


def failover(place: Place) -> Found:
    """See ``streams.failover``, which needs more packages than what comes before it."""
    from bench.gpu_slot import streams

    return streams.failover(place)


def gaps(place: Place) -> Found:
    """See ``streams.gaps``."""
    from bench.gpu_slot import streams

    return streams.gaps(place)


def inflated(place: Place) -> Found:
    """An enlarged pair served with and without speculation, beside transformers' own: speeds, and whose tokens differ.

    Its weights are written to disk first, 20 GB; a slot that is too short for it leaves it to the next.
    """
    only = ["--only", "systems", "--systems", "transformers", "--batch", "1", "--prompts", "2", "--peer-tokens", "5"]
    return _bench(place, "gpu-8b", *only)


def loaded(place: Place) -> Found:
    """The same pair with several streams at once, and what passes between the steps of the target."""
    return _bench(place, "gpu-8b", "--only", "decode", "--batch", "2" if place.dry else "1,8,32", "--prompts", "2")


def inflated_32b(place: Place) -> Found:
    """A pair whose target has 32 B parameters, one stream; 64 GB are written to disk first."""
    return _bench(place, "gpu-32b", "--only", "decode", "--batch", "1", "--prompts", "1")


def _bench(place: Place, pair: str, *arguments: str) -> Found:
    where = ["--pair", "shipped", "--device", "cpu"] if place.dry else ["--pair", pair, "--device", "cuda"]
    sizes = ["--repeats", "1", "--max-tokens", "16" if place.dry else "96", "--temperature", "0,1"]
    with tempfile.TemporaryDirectory() as folder:
        found = _told("bench", *where, *sizes, *arguments, "--no-check", "--results", folder)
        (results,) = Path(folder).glob("*.json")
        return {**found, "results": json.loads(results.read_text())}


def _told(module: str, *arguments: str) -> Found:
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return {"output": done.stdout[-6000:].splitlines()}
