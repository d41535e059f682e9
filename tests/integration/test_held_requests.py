"""A gateway holds the first requests of a model that is scaled to zero until its coordinators and targets serve."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from specdec.commands.up.cluster import Cluster, RoleSettings, free_port, service_spec
from specdec.commands.up.plan import LocalPlan, plan_services
from specdec.commands.up.service_process import ServiceProcess
from specdec.gateway.http import sent
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.clusters import TIMEOUTS
from tests.support.services.coordinator_harness import expected_ids
from tests.support.services.faults import eventually
from tests.support.services.gateways import GatewayAtHand, gateway
from tests.support.services.key_files import hash_key
from tests.support.services.model_pair import ModelPair

pytestmark = pytest.mark.timeout(120)
PROMPT: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "max_tokens": 8,
    "seed": 11,
    "temperature": 1,
    "ignore_eos": True,
    "return_token_ids": True,
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temperature": 0}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": PROMPT,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/messages": {"messages": CHAT["messages"], "max_tokens": 4, "model": "scripted"},
}
LONG_S = 100.0


def held(one: GatewayAtHand, model: str = "") -> float:
    """What an autoscaler reads."""
    return one.parts.registry.get_sample_value("specdec_gateway_requests_held", {"model": model}) or 0.0


async def is_held(one: GatewayAtHand, number: int = 1, model: str = "") -> None:
    async def shown() -> bool:
        return held(one, model) == number

    await eventually(shown, f"{number} requests are held")


def sleeping_coordinator(folder: Path, port: int, **overrides: object) -> ServiceProcess:
    """A coordinator as a process that is not started."""
    settings = RoleSettings(overrides={"metrics_port": None, **overrides})
    return ServiceProcess(
        service_spec("coordinator", "coordinator", port, settings, environment={}), folder / "coordinator.log"
    )


@asynccontextmanager
async def asleep(folder: Path, *, is_default: bool = True, **settings: Any) -> AsyncIterator[tuple[Any, Any, Any]]:
    """A gateway, the coordinator process of its model, which is not started, and the target, which is not either."""
    target, port = ScriptedTarget(), free_port()
    target.tokenizer_config = json.dumps({"chat_template": "{{ messages[0].content }}"})
    await target.start()  # It takes its port.
    await target.stop()
    coordinator = sleeping_coordinator(folder, port, targets=target.address, reconnect_backoff_max_s=0.1)
    address = f"127.0.0.1:{port}"
    where: dict[str, Any] = {} if is_default else {"models": (f"scripted={address}",)}
    fields = {"hold_s": LONG_S, "keep_alive_s": 0.05, **where, **settings}
    try:
        async with gateway(address if is_default else "127.0.0.1:1", **fields) as one:
            yield one, coordinator, target
    finally:
        coordinator.kill()
        await target.stop()


async def post(one: GatewayAtHand, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
    async with one.http() as client:
        return await client.post(path, json=body, headers=headers)


async def wakes(coordinator: ServiceProcess, target: ScriptedTarget) -> None:
    """What an autoscaler does."""
    coordinator.start()
    await target.start()


async def test_the_first_requests_of_each_route_are_answered_when_coordinator_and_target_have_started(
    tmp_path: Path,
) -> None:
    async with asleep(tmp_path) as (one, coordinator, target):
        assert (await one.http().get("/health")).status_code == 200, "readiness does not depend on a model that sleeps"
        bodies = {**STREAMS, "/tokenize": {"prompt": "x"}}
        asked = {path: asyncio.create_task(post(one, path, body)) for path, body in bodies.items()}
        await is_held(one, len(bodies))
        await wakes(coordinator, target)
        answers = {path: await answer for path, answer in asked.items()}
        assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(bodies, 200)
        assert answers["/v1/completions"].json()["choices"][0]["token_ids"] == expected_ids(target, 8)
        assert held(one) == 0


async def test_a_request_waits_for_a_target_longer_than_its_coordinator_does(tmp_path: Path) -> None:
    async with asleep(tmp_path) as (one, coordinator, target):
        quick = sleeping_coordinator(
            tmp_path, int(coordinator.spec.address.rpartition(":")[2]), targets=target.address,
            reconnect_backoff_max_s=0.1, target_timeout_s=0.2,
        )  # fmt: skip
        try:
            await wakes(quick, target)
            assert (await post(one, "/v1/completions", PROMPT)).status_code == 200
            await target.stop()
            asked = asyncio.create_task(post(one, "/v1/completions", PROMPT))
            await is_held(one)
            await target.start()
            assert (await asked).json()["choices"][0]["token_ids"] == expected_ids(target, 8)
        finally:
            quick.kill()


async def _streamed(one: GatewayAtHand, path: str, body: Any, kept_alive: asyncio.Event) -> list[dict[str, Any]]:
    """The events of a stream; tells when it has been kept alive."""
    async with one.http() as client, client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), path
        assert answer.headers["x-request-id"] and answer.headers["cache-control"] == "no-cache"
        data = b""
        async for piece in answer.aiter_bytes():
            data += piece
            if data.count(b": keep-alive\n") >= 3:
                kept_alive.set()
        assert kept_alive.is_set()
        return [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]


async def test_held_streams_are_kept_alive_and_end_as_any_other(tmp_path: Path) -> None:
    async with asleep(tmp_path) as (one, coordinator, target):
        alive = {path: asyncio.Event() for path in STREAMS}
        asked = [asyncio.create_task(_streamed(one, path, body, alive[path])) for path, body in STREAMS.items()]
        await asyncio.gather(*(each.wait() for each in alive.values()))
        await wakes(coordinator, target)
        completion, chat, response, message = await asyncio.gather(*asked)
    ids = [token for event in completion for token in event["choices"][0]["token_ids"]]
    assert ids == expected_ids(target, 8)
    assert chat[-1]["choices"][0]["finish_reason"] == "length"
    assert response[-1]["type"] == "response.incomplete"
    assert message[-1]["type"] == "message_stop"


async def test_a_model_that_does_not_start_in_time_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sent, "PATIENCE_S", 0.05)
    why = "was not served within 2 s (hold_s)"

    async def streamed(one: GatewayAtHand, path: str) -> dict[str, Any]:
        (last,) = await _streamed(one, path, STREAMS[path], asyncio.Event())
        return last

    async with asleep(tmp_path, hold_s=2) as (one, _coordinator, _target):
        began_s = time.monotonic()
        for answer in await asyncio.gather(*(post(one, path, body) for path, body in STREAMS.items())):
            assert answer.status_code == 503 and 10 <= int(answer.headers["retry-after"]) <= 20
            assert why in answer.text
        assert time.monotonic() - began_s >= 2
        chat, response, message = await asyncio.gather(*(streamed(one, path) for path in list(STREAMS)[1:]))
        assert chat["error"]["code"] == response["code"] == "service_unavailable"
        assert response["type"] == message["type"] == "error"
        assert message["error"]["type"] == "overloaded_error"
        assert why in chat["error"]["message"] and why in response["message"] and why in message["error"]["message"]
        assert held(one) == 0


async def test_only_so_many_are_held_and_one_who_leaves_makes_room(tmp_path: Path) -> None:
    async with asleep(tmp_path, max_held_requests=2, is_default=False) as (one, coordinator, target):
        body = {**PROMPT, "model": "scripted"}
        asked = [asyncio.create_task(post(one, "/v1/completions", body)) for _ in range(2)]
        await is_held(one, 2, "scripted")
        assert held(one, "") == 0, "each model has its own number, by which only it is started"
        refused = await post(one, "/v1/completions", body)
        assert refused.status_code == 503 and 10 <= int(refused.headers["retry-after"]) <= 20
        assert "max_held_requests" in refused.json()["error"]["message"]
        chat = await post(one, "/v1/chat/completions", {**CHAT, "model": "scripted"})
        assert chat.status_code == 503 and "max_held_requests" in chat.text
        asked[0].cancel()
        await is_held(one, 1, "scripted")
        asked[0] = asyncio.create_task(post(one, "/v1/completions", body))
        await is_held(one, 2, "scripted")
        await wakes(coordinator, target)
        for answer in asked:
            assert (await answer).json()["choices"][0]["token_ids"] == expected_ids(target, 8)


async def test_a_client_that_leaves_a_held_chat_frees_its_place(tmp_path: Path) -> None:
    async with asleep(tmp_path) as (one, _coordinator, _target):
        for fields in ({}, {"stream": True}):
            asked = asyncio.create_task(post(one, "/v1/chat/completions", {**CHAT, **fields}))
            await is_held(one)
            asked.cancel()
            await is_held(one, 0)


async def test_questions_for_models_are_answered_at_once_and_start_none(tmp_path: Path) -> None:
    async with asleep(tmp_path, is_default=False) as (one, coordinator, target), one.http() as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("scripted", None)
        assert (await client.get("/v1/models/scripted")).json()["id"] == "scripted"
        assert (await client.get("/v1/models/other")).status_code == 503, "the default model's name is not known yet"
        assert held(one, "scripted") == held(one, "") == 0
        await wakes(coordinator, target)
        await post(one, "/v1/completions", {**PROMPT, "model": "scripted"})
        (card,) = (await client.get("/v1/models")).json()["data"]
        coordinator.kill()
        (again,) = (await client.get("/v1/models")).json()["data"]
        assert again == card and card["max_model_len"] == target.identity.max_model_len


async def test_a_draining_gateway_refuses_what_it_holds_at_once(tmp_path: Path) -> None:
    async with asleep(tmp_path) as (one, _coordinator, _target):
        asked = [asyncio.create_task(post(one, "/v1/completions", {**PROMPT, "stream": s})) for s in (False, True)]
        await is_held(one, 2)
        async with asyncio.timeout(20):
            await one.drain(LONG_S)
        assert "the gateway is shutting down" in (await asked[0]).text
        assert "the gateway is shutting down" in (await asked[1]).text


async def test_nothing_is_held_by_default(tmp_path: Path) -> None:
    async with asleep(tmp_path, hold_s=0) as (one, _coordinator, _target), one.http() as client:
        assert (await client.get("/health")).status_code == 503
        assert one.parts.registry.get_sample_value("specdec_gateway_requests_held", {"model": ""}) is None
        answer = await client.post("/v1/completions", json=PROMPT)
        assert answer.status_code == 503 and "hold_s" not in answer.text
        assert (await client.get("/v1/models")).status_code == 503


async def test_a_gateway_beyond_loopback_holds_requests_before_it_knows_who_needs_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"id": "a", "tenant": "a", "sha256": hash_key("mine")}]}))
    async with asleep(tmp_path, host="0.0.0.0") as (one, former, target):
        assert (await one.http().get("/health")).status_code == 200
        port = int(former.spec.address.rpartition(":")[2])
        coordinator = sleeping_coordinator(tmp_path, port, targets=target.address, api_keys_file=keys)
        asked = {
            key: asyncio.create_task(post(one, "/v1/completions", PROMPT, authorization=f"Bearer {key}"))
            for key in ("mine", "another")
        }
        await is_held(one, 2)
        try:
            await wakes(coordinator, target)
            answers = {key: (await answer).status_code for key, answer in asked.items()}
        finally:
            coordinator.kill()
    assert answers == {"mine": 200, "another": 401}


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_held_requests_get_the_tokens_of_a_model_that_never_slept(
    shipped_cluster: Cluster, shipped_pair: ModelPair, tmp_path: Path
) -> None:
    greedy = {**PROMPT, "prompt": "def fibonacci(n):", "max_tokens": 48, "temperature": 0}
    bodies = [greedy, *({**greedy, "temperature": 1, "seed": seed} for seed in (1, 2))]
    bodies.append({**bodies[-1], "stream": True})

    async def tokens_of(one: GatewayAtHand, body: dict[str, Any]) -> list[int]:
        async with one.http() as client:
            answer = await client.post("/v1/completions", json=body, timeout=500.0)
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            found: list[int] = answer.json()["choices"][0]["token_ids"]
            return found
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return [token for event in events for token in event["choices"][0]["token_ids"]]

    async with gateway(shipped_cluster.address) as awake:
        expected = [await tokens_of(awake, body) for body in bodies]
    plan = LocalPlan(
        target_model=str(shipped_pair.target), draft_model=str(shipped_pair.draft), device="cpu", free_ports=True
    )
    with Cluster(plan_services(plan, environment={}), log_dir=tmp_path, timeouts=TIMEOUTS) as asleep:
        async with gateway(asleep.address, hold_s=500.0, keep_alive_s=0.5) as one:
            for _ in range(2):  # The second time it has been awake before.
                asked = [asyncio.create_task(tokens_of(one, body)) for body in bodies]
                await is_held(one, len(bodies))
                await asyncio.to_thread(asleep.start)
                assert [await answer for answer in asked] == expected
                await asyncio.to_thread(asleep.stop)
