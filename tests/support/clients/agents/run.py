"""Runs a client's ten turns in the environment that has it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.clients.agents.play import Where, asked
from tests.support.clients.agents.turns import CUT_RESULT, SCHEMA, TOOL, TURNS, WEATHER, Answer
from tests.support.clients.page import ROOT

_PATIENCE_S = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Client:
    """A framework."""

    name: str
    program: str
    """Module of tests/support/clients/agents, or a program of Node.js."""
    folder: str = ""
    """Folder of .tools/clients; empty: the tests' own environment."""
    tells_thoughts: bool = True
    """False: the library leaves out what models think."""
    is_slow: bool = False
    """It loads for many seconds."""

    def command(self) -> list[str]:
        """The command that plays the turns."""
        tools = ROOT / ".tools" / "clients" / self.folder
        assert tools.is_dir(), f"make tools, or make test-long, installs {self.name}"
        if self.program.endswith(".mjs"):
            return ["node", str(Path(__file__).with_name(self.program)), str(tools)]
        python = str(tools / "bin" / "python") if self.folder else sys.executable
        return [python, "-m", f"tests.support.clients.agents.{self.program}"]


CLIENTS = (
    Client("openai", "openai_client"),
    Client("anthropic", "anthropic_client"),
    Client("LangChain", "langchain_client", "frameworks", tells_thoughts=False),
    Client("LlamaIndex", "llama_index_client", "frameworks", tells_thoughts=False),
    Client("LiteLLM", "litellm_client", "litellm", is_slow=True),
    Client("Vercel AI SDK", "ai_sdk_client.mjs", "ai-sdk"),
)


def played(client: Client, where: Where) -> list[Answer]:
    """What the client got in each turn. Raises AssertionError if its program fails."""
    told = {"where": dataclasses.asdict(where), "turns": asked(TURNS), "tool": TOOL, "schema": SCHEMA}
    done = subprocess.run(
        client.command(),
        input=json.dumps({**told, "weather": WEATHER, "cutResult": CUT_RESULT}),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE_S,
    )
    assert done.returncode == 0, f"{client.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return [Answer(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
