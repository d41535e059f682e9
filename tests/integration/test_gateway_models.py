"""Several models behind one gateway: each request goes to the coordinators of the model that it names."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specdec.gateway.settings import GatewaySettings
from tests.support.scripted.model import identity
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import Harness, running
from tests.support.services.gateways import GatewayAtHand, gateway
from tests.support.services.key_files import hash_key

pytestmark = pytest.mark.timeout(120)
NOBODY = "127.0.0.1:1"
PROMPT: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


@asynccontextmanager
async def serving(*names: str, **changes: Any) -> AsyncIterator[list[Harness]]:
    """Coordinators of models with these names."""
    async with AsyncExitStack() as stack:
        found = []
        for name in names:
            target = ScriptedTarget()
            target.identity = identity(name)
            found.append(await stack.enter_async_context(running([target], **changes)))
        yield found


async def asked(one: GatewayAtHand, path: str, body: dict[str, Any], key: str = "none") -> tuple[int, Any]:
    async with one.http() as client:
        answer = await client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
        return answer.status_code, answer.json()


async def listed(one: GatewayAtHand, key: str = "none") -> list[str]:
    async with one.http() as client:
        answer = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        return [card["id"] for card in answer.json()["data"]]


async def test_each_model_is_asked_at_its_own_coordinators_and_all_are_listed() -> None:
    async with serving("scripted", "org/coder") as (first, second):
        models = [f"org/coder={second.address}"]
        async with gateway(first.address, models=models) as one:
            assert await listed(one) == ["scripted", "org/coder"]
            for model, served in (("org/coder", "org/coder"), ("scripted", "scripted"), ("", "scripted")):
                fields = {**PROMPT, **({"model": model} if model else {})}
                status, answer = await asked(one, "/v1/completions", fields)
                assert (status, answer["model"]) == (200, served), answer
            status, answer = await asked(one, "/v1/completions", {**PROMPT, "model": "org/other"})
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
            async with one.http() as client:
                for model in ("scripted", "org/coder"):
                    assert (await client.get(f"/v1/models/{model}")).json()["id"] == model
                assert (await client.get("/v1/models/org/other")).status_code == 404


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"]
)
async def test_a_model_answers_while_another_ones_coordinators_are_away(path: str) -> None:
    bodies = {
        "/v1/completions": PROMPT,
        "/v1/responses": {"input": "hi", "max_output_tokens": 16},
        "/tokenize": {"prompt": "hi"},
    }
    body = bodies.get(path, CHAT)
    async with serving("org/coder") as (only,), gateway(NOBODY, models=[f"org/coder={only.address}"]) as one:
        status, answer = await asked(one, path, {**body, "model": "org/coder"})
        # The scripted model has no chat template, which only its own coordinator can say.
        is_chat = path not in ("/v1/completions", "/tokenize")
        assert status == (400 if is_chat else 200), answer
        assert not is_chat or "no chat template" in json.dumps(answer)
        if path == "/tokenize":
            status, _ = await asked(one, path, {**body, "model": "org/else"})
            assert status == 503
            assert await listed(one) == ["org/coder"]


async def test_a_key_is_good_for_the_models_whose_coordinators_know_it(tmp_path: Path) -> None:
    addresses = {}
    async with AsyncExitStack() as stack:
        for name, key in (("scripted", "key-one"), ("org/coder", "key-two")):
            keys = tmp_path / f"{key}.json"
            keys.write_text(json.dumps({"keys": [{"id": key, "tenant": key, "sha256": hash_key(key)}]}))
            (harness,) = await stack.enter_async_context(serving(name, api_keys_file=keys))
            addresses[name] = harness.address
        models = [f"org/coder={addresses['org/coder']}"]
        one = await stack.enter_async_context(gateway(addresses["scripted"], models=models))
        assert await listed(one, "key-one") == ["scripted"]
        assert await listed(one, "key-two") == ["org/coder"]
        for model, key, expected in (
            ("scripted", "key-one", 200),
            ("org/coder", "key-one", 401),
            ("org/coder", "key-two", 200),
            ("scripted", "key-two", 401),
        ):
            status, answer = await asked(one, "/v1/completions", {**PROMPT, "model": model}, key)
            assert status == expected, answer


async def test_a_keys_quota_is_that_of_each_model_and_spent_for_each_alone(tmp_path: Path) -> None:
    quotas: dict[str, dict[str, float]] = {
        "scripted": {"tokens_per_s": 0.001, "burst_tokens": 10},
        "org/coder": {"tokens_per_s": 0.001, "burst_tokens": 20},
        "org/free": {},
    }
    addresses = {}
    async with AsyncExitStack() as stack:
        for number, (name, quota) in enumerate(quotas.items()):
            keys = tmp_path / f"{number}.json"
            entry = {"id": "mine", "tenant": "mine", "sha256": hash_key("key"), **quota}
            keys.write_text(json.dumps({"keys": [entry]}))
            (harness,) = await stack.enter_async_context(serving(name, api_keys_file=keys))
            addresses[name] = harness.address
        models = [f"{name}={addresses[name]}" for name in ("org/coder", "org/free")]
        one = await stack.enter_async_context(gateway(addresses["scripted"], models=models))
        # Each request takes 11 tokens: 3 of its prompt and 8 new ones.
        for model, statuses in (
            ("scripted", [200, 429]),
            ("org/coder", [200, 200, 429]),
            ("org/free", [200, 200, 200]),
            ("scripted", [429]),
        ):
            for expected in statuses:
                status, answer = await asked(one, "/v1/completions", {**PROMPT, "model": model}, "key")
                assert status == expected, (model, answer)


async def test_a_model_may_have_several_coordinators() -> None:
    async with serving("org/coder") as (only,):
        models = [f"org/coder={NOBODY}", f"org/coder={only.address}"]
        async with gateway(NOBODY, models=models) as one:
            for _ in range(3):
                status, answer = await asked(one, "/v1/completions", {**PROMPT, "model": "org/coder"})
                assert (status, answer["model"]) == (200, "org/coder")


async def _served(one: GatewayAtHand, count: int, *releases: Harness) -> list[int]:
    """How many of `count` requests for a model each release has answered."""
    before = [harness.metric("requests_total", outcome="OK") for harness in releases]
    for _ in range(count):
        status, answer = await asked(one, "/v1/completions", {**PROMPT, "model": "org/m"})
        assert status == 200, answer
    return [int(h.metric("requests_total", outcome="OK") - n) for h, n in zip(releases, before, strict=True)]


async def test_requests_move_by_share_to_another_release_of_the_model_and_back() -> None:
    async with serving("org/m", "org/m") as (blue, green):
        for share, expected in (
            (0, [20, 0]),
            (10, [18, 2]),
            (25, [15, 5]),
            (75, [5, 15]),
            (100, [0, 20]),
            (0, [20, 0]),
        ):
            models = [f"org/m={blue.address}", f"org/m={green.address}@{share}"]
            async with gateway(NOBODY, models=models) as one:
                assert await _served(one, 20, blue, green) == expected, share


async def test_a_release_that_is_away_leaves_its_share_to_the_other() -> None:
    async with (
        serving("org/m") as (green,),
        gateway(NOBODY, models=[f"org/m={NOBODY}", f"org/m={green.address}@10"]) as one,
    ):
        assert await _served(one, 5, green) == [5]


@pytest.mark.parametrize(
    "models",
    [("m=h:1@101",), ("m=h:1@-1",), ("m=h:1@x",), ("m=h:1@",), ("m=h:1@50",), ("m=h:1@60", "m=h:2@60", "m=h:3")],
)
def test_shares_that_are_none_are_refused(models: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="models"):
        GatewaySettings(coordinators=("h:1",), models=models)


@pytest.mark.parametrize("entry", ["coder", "=h:1", "coder=", "coder=h", "coder=h:99999", " =h:1"])
def test_an_entry_that_is_no_model_with_an_address_is_refused(entry: str) -> None:
    with pytest.raises(ValidationError, match="models"):
        GatewaySettings(coordinators=("h:1",), models=(entry,))


def test_models_are_read_from_a_flag_as_a_list() -> None:
    settings = GatewaySettings.model_validate({"coordinators": "h:1", "models": "a/b=dns:///x:50051, c=y:2,c=z:3"})
    assert settings.coordinators_of == {"": ("h:1",), "a/b": ("dns:///x:50051",), "c": ("y:2", "z:3")}
