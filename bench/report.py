"""The machine, the versions, and where raw results go."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "tokenizers")


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    info: dict[str, object] = {
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": list(os.getloadavg()),
    }
    import torch

    if torch.cuda.is_available():
        info["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return info


def versions() -> dict[str, str]:
    """Of this code and of what it runs on."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"python": platform.python_version(), "specdec": commit.stdout.strip() or "unknown", **found}


def plain(plan: Any) -> dict[str, object]:
    """A dataclass as JSON-ready values."""
    return dataclasses.asdict(plan)


def save(results: dict[str, object], folder: Path, device: str) -> Path:
    """Write raw results; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M")
    path = folder / f"{stamp}-{device}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return {"median": values[0], "q1": values[0], "q3": values[0]} if values else {}
    q1, median, q3 = statistics.quantiles(values, n=4)
    return {"median": median, "q1": q1, "q3": q3}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
