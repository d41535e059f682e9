"""Chats through a gateway whose coordinators know different targets: all processes, and one of them is killed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from specdec.client import Client
from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from tests.support.servers.redis_server import RedisServer
from tests.support.services.clusters import TIMEOUTS, start_cluster
from tests.support.services.faults import PATIENCE_S, scrape
from tests.support.services.model_pair import ModelPair

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

SYSTEM = "You are terse, and you answer in one sentence that says what was asked. " * 2
QUESTIONS = ("Name three colours.", "Name three more.", "And the last one?", "Thank you.")
NUM_CHATS, NUM_TOKENS = 6, 24


@dataclass
class Fleet:
    """Two coordinators, each with a target that the other one does not know, behind a gateway."""

    parts: list[Cluster]
    metrics_ports: list[int]
    url: str

    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, timeout=PATIENCE_S)

    def num_tokens(self) -> list[float]:
        """Output tokens of each coordinator so far."""
        return [scrape(port).get("specdec_coordinator_tokens_total", 0.0) for port in self.metrics_ports]

    async def kill_who_serves(self) -> int:
        """Kill the coordinator that has a running request; returns its number."""
        for number, cluster in enumerate(self.parts):
            async with Client(cluster.address) as client:
                if (await client.status()).num_running:
                    cluster.kill("coordinator")
                    return number
        raise AssertionError("no coordinator runs a request")


@pytest.fixture
def fleet(tiny_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("chats")
    (folder / "redis").mkdir()
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis"))
        ports = [free_port() for _ in range(2)]
        shared: dict[str, object] = {"resume_secret": "a secret that both share", "redis_timeout_s": 20.0}
        parts = [
            stack.enter_context(
                start_cluster(
                    tiny_pair,
                    folder / owner,
                    num_drafts=0,
                    target_settings={"block_size": 16},
                    coordinator_settings={
                        **shared,
                        "redis_url": f"{redis.url}",
                        "owner_id": owner,
                        "metrics_port": port,
                    },
                )
            )
            for owner, port in zip(("one", "two"), ports, strict=True)
        ]
        overrides: dict[str, object] = {"coordinators": [part.address for part in parts]}
        spec = service_spec(
            "gateway", "gateway", free_port(), RoleSettings(defaults={}, overrides=overrides), environment=os.environ
        )
        front = stack.enter_context(Cluster([spec], log_dir=folder / "front", timeouts=TIMEOUTS))
        front.start()
        yield Fleet(parts, ports, f"http://{spec.address}")


async def _nothing() -> None:
    """Nothing happens in mid-stream."""


@dataclass
class Chat:
    """A chat, one question after the other."""

    number: int
    salt: str = ""
    messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])
    ids: list[list[int]] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)

    async def ask(self, client: httpx2.AsyncClient, on_output: Callable[[], Awaitable[object]] = _nothing) -> None:
        """Ask the next question; `on_output` is called once the answer has begun."""
        question = f"{self.number}: {QUESTIONS[len(self.ids)]}"
        self.messages.append({"role": "user", "content": question})
        fields: dict[str, Any] = {
            "messages": self.messages, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True, "stream_options": {"include_usage": True}, "cache_salt": self.salt or None,
        }  # fmt: skip
        ids: list[int] = []
        text, has_begun = "", False
        async with client.stream("POST", "/v1/chat/completions", json=fields) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
                    text += choice["delta"].get("content") or ""
                if event.get("usage"):
                    self.num_cached.append((event["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))
                if ids and not has_begun:
                    has_begun = True
                    await on_output()
        assert len(ids) == NUM_TOKENS
        self.ids.append(ids)
        self.messages.append({"role": "assistant", "content": text})


async def test_a_chat_stays_with_a_coordinator_and_goes_on_with_the_other_when_that_is_killed(fleet: Fleet) -> None:
    async with fleet.http() as client:
        chats = [Chat(number) for number in range(NUM_CHATS)]
        served = [0, 0]
        for chat in chats:
            before = fleet.num_tokens()
            for _ in QUESTIONS:
                await chat.ask(client)
            grown = [after - former for after, former in zip(fleet.num_tokens(), before, strict=True)]
            assert sorted(grown) == [0, NUM_TOKENS * len(QUESTIONS)], "all turns of a chat are of one coordinator"
            served[grown.index(max(grown))] += 1
            assert all(cached > 0 for cached in chat.num_cached[1:]), "and find the turn before in its target's cache"
            assert chat.num_cached[1:] == sorted(chat.num_cached[1:])

        again = Chat(0, salt="again")
        await again.ask(client)
        killed: list[int] = []

        async def kill() -> None:
            killed.append(await fleet.kill_who_serves())

        await again.ask(client, kill)
        await asyncio.gather(*(again.ask(client) for _ in QUESTIONS[2:3]))
        await again.ask(client)
        assert again.ids == chats[0].ids
        assert again.num_cached[2] == 0 or again.num_cached[3] > 0, "the other target caches the chat from now on"
        assert len(killed) == 1
