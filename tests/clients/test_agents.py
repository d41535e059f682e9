"""Ten turns of an agent with each framework, unchanged: tools, a cut call, hidden thoughts, JSON, broken streams."""

from __future__ import annotations

import asyncio
import re

import anthropic
import openai
import pytest

from tests.support.clients.agents.play import Where
from tests.support.clients.agents.run import CLIENTS, Client, played
from tests.support.clients.agents.scripted import FAMILIES, Agent
from tests.support.clients.agents.turns import TURNS, faults
from tests.support.clients.page import ROOT
from tests.support.services.fake_coordinator import running_fake_coordinator
from tests.support.services.gateways import gateway

pytestmark = pytest.mark.timeout(600)


def test_the_page_tells_which_clients_play_how_many_turns() -> None:
    _, _, section = (ROOT / "docs" / "openai-clients.md").read_text().partition("\n## Agents\n")
    rows = re.findall(r"(?m)^\| ([\w ]+) \| (`.+`) \| (\d+) of (\d+) \| (.+) \|$", section)
    names, packages, played, turns, thoughts = zip(*rows, strict=True)
    assert list(names) == [client.name for client in CLIENTS]
    assert set(played) == set(turns) == {str(len(TURNS))}
    assert [told != "left out by the client" for told in thoughts] == [client.tells_thoughts for client in CLIENTS]
    installed = {f"{module.__name__}=={module.__version__}" for module in (openai, anthropic)}
    for folder in {client.folder for client in CLIENTS} - {""}:
        lines = (ROOT / "tests" / "clients" / f"{folder}.txt").read_text().splitlines()
        installed.update(line for line in lines if not line.startswith("#"))
    assert set(re.findall(r"`([^`]+)`", " ".join(packages))) == installed


@pytest.mark.parametrize(
    "client",
    [pytest.param(one, id=one.name, marks=[pytest.mark.long] if one.is_slow else []) for one in CLIENTS if one.folder],
)
async def test_ten_turns_of_a_framework(client: Client) -> None:
    agent = Agent(FAMILIES["hermes"])
    with running_fake_coordinator(servicer=agent) as (_, address):
        async with gateway(address) as one:
            seen = await asyncio.to_thread(played, client, Where(one.url, "big", cut_tokens=8))
    assert not faults(seen, tells_thoughts=client.tells_thoughts)
    assert all(word in agent.prompts[-1] for word in ("21 degrees", "3 degrees", "unknown: a\nb", "Oslo"))
