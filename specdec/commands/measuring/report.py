"""Reports of measurements as JSON, Markdown and plots, with a description of the machine."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from specdec.commands.measuring.tables import Table

_MOST_ASKING_S = 20.0
_CPU_FIELDS = {"vendor_id": "maker", "model name": "model", "cpu family": "family", "model": "number"}
_ISA = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd")


@dataclass(slots=True)
class Report:
    """Results of one run, with their tables and plots."""

    pair: str
    """Heading of the page, and note in every plot."""
    facts: dict[str, object]
    console: Console
    results: dict[str, object] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    plots: dict[str, str] = field(default_factory=dict)
    """SVG by name."""

    def add(self, name: str, result: object, tables: Sequence[Table], plots: Mapping[str, str] | None = None) -> None:
        """Add the result of a part, and print its tables."""
        self.results[name] = result
        self.tables += tables
        self.plots |= plots or {}
        for table in tables:
            table.print(self.console)

    def save(self, folder: Path, name: str) -> Path:
        """Write NAME.json, NAME.md and NAME-PLOT.svg, with a number if NAME.md exists; return the page."""
        folder.mkdir(parents=True, exist_ok=True)
        numbered = (f"{name}{suffix}" for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2))))
        name = next(free for free in numbered if not (folder / f"{free}.md").exists())
        raw = {"pair": self.pair, **self.facts, **self.results}
        (folder / f"{name}.json").write_text(json.dumps(raw, indent=1) + "\n")
        pictures = []
        for plot, svg in self.plots.items():
            file = f"{name}-{plot}.svg"
            (folder / file).write_text(svg)
            pictures.append(f"![{plot}]({file})\n")
        about = "\n".join(f"- {key}: {_in_words(value)}" for key, value in self.facts.items())
        sections = [f"# {name}", self.pair, about, *(table.markdown() for table in self.tables), *pictures]
        page = folder / f"{name}.md"
        page.write_text("\n\n".join(section.rstrip() for section in sections) + "\n")
        return page


def machine(cores: Sequence[int], device: str = "cpu") -> dict[str, object]:
    """Description of the machine; `cores` are the used ones."""
    info: dict[str, object] = {
        **_cpu(),
        "num_cores": os.cpu_count(),
        "cores_used": len(cores),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    if device != "cpu":
        info["gpus"] = _gpus()
    return info


def _gpus() -> list[str]:
    """Names, drivers and compute modes of the GPUs, from the driver's tool: torch would start a context on a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,driver_version,compute_mode", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_ASKING_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _cpu() -> dict[str, object]:
    found: dict[str, Any] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key in _CPU_FIELDS:
            found.setdefault(_CPU_FIELDS[key], value)
        elif key in ("flags", "Features"):
            found.setdefault("isa", [flag for flag in _ISA if flag in value.split()])
    return {"cpu": found or platform.processor()}


def _in_words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {_in_words(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        words = [str(item) for item in value]
        return (", " if any(" " in word for word in words) else " ").join(words)
    return str(value)
