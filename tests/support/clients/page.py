"""The programs of docs/openai-clients.md; each section runs as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
URL = "http://127.0.0.1:8000"
_PAGE = ROOT / "docs" / "openai-clients.md"
_BLOCK = re.compile(r"(?ms)^```(sh|python)\n(.*?)^```")
_PATIENCE_S = 240
INSTALLED = {
    "openai-agents": "agents",
    "LangChain": "frameworks",
    "LlamaIndex": "frameworks",
    "lm-eval": "lm-eval",
    "llama-benchy": "llama-benchy",
    "guidellm": "guidellm",
    "aiperf": "aiperf",
    "vllm bench serve": "vllm",
}
"""Folder that tests/clients/install.sh installs a section's client into; others are in the tests' environment."""


@dataclass(frozen=True)
class Section:
    """One client's section of the page."""

    name: str
    blocks: list[tuple[str, str]]
    """Language and text of each block, without the blocks that install the client."""
    installs: list[str]
    """Requirements that the section's pip commands install."""


def sections() -> dict[str, Section]:
    """All sections of the page, by name."""
    found = {}
    for part in re.split(r"(?m)^## ", _PAGE.read_text(encoding="utf-8"))[1:]:
        name = part.partition("\n")[0]
        blocks = [(match[1], match[2]) for match in _BLOCK.finditer(part)]
        installs = [word.strip("'\"") for _, text in blocks for word in _installed_by(text)]
        found[name] = Section(name, [block for block in blocks if not _installed_by(block[1])], installs)
    return found


@dataclass(frozen=True)
class Reader:
    """Runs the page's programs in a folder that has the checkout's models/."""

    url: str
    folder: Path

    def run(self, name: str, *, instead: tuple[str, str] = ("", ""), **variables: str) -> str:
        """Output of the blocks of a section.

        Args:
            name: the section.
            instead: a text of the page, and its replacement.
            variables: environment variables beside those of the tests.

        Raises:
            AssertionError: a program failed; the message has its output.
        """
        models = self.folder / "models"
        if not models.exists():
            models.symlink_to(ROOT / "models")
        return "".join(
            self._run(name, language, text.replace(*instead) if instead[0] else text, variables)
            for language, text in sections()[name].blocks
        )

    def _run(self, name: str, language: str, text: str, variables: dict[str, str]) -> str:
        text = text.replace(URL, self.url)
        tools = ROOT / ".tools" / "clients" / INSTALLED[name] / "bin" if name in INSTALLED else Path(sys.prefix) / "bin"
        assert tools.is_dir(), f"make tools, or make test-long, installs {name}"
        command = {"sh": ["bash", "-euo", "pipefail", "-c", text], "python": [str(tools / "python"), "-c", text]}
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
        done = subprocess.run(
            command[language],
            cwd=self.folder,
            env={**kept, "PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(self.folder), **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
        assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


def _installed_by(text: str) -> list[str]:
    return text.removeprefix("pip install ").split() if text.startswith("pip install ") else []
