"""An agent's loop of ten turns with OpenAI's and Anthropic's clients, over the forms in which model families call.

`tests/clients/test_agents.py` has the same turns with other clients.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.support.clients.agents.anthropic_client import AnthropicConversation
from tests.support.clients.agents.openai_client import OpenAIConversation
from tests.support.clients.agents.play import Where, asked, play
from tests.support.clients.agents.scripted import FAMILIES, Agent
from tests.support.clients.agents.turns import CUT_RESULT, TURNS, faults
from tests.support.services.fake_coordinator import running_fake_coordinator
from tests.support.services.gateways import gateway

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("family", FAMILIES)
async def test_ten_turns_with_whatever_happens_on_the_way(family: str) -> None:
    agent = Agent(FAMILIES[family])
    with running_fake_coordinator(servicer=agent) as (_, address):
        async with gateway(address) as one:
            where = Where(one.url, "big", cut_tokens=8)
            for conversation in (OpenAIConversation(where), AnthropicConversation(where)):
                seen = await asyncio.to_thread(lambda: list(play(conversation, asked(TURNS))))  # noqa: B023
                assert not faults(seen, tells_thoughts=True)
                told = agent.prompts[-1]
                assert all(word in told for word in ("21 degrees", "3 degrees", CUT_RESULT, "unknown: a\nb", "Oslo"))
