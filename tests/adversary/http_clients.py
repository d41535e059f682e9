"""Clients of gateways, which resume for them: their answers are those of the undisturbed run over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from specdec.client import Completion
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.adversary.fleet import Fleet
from tests.adversary.progress import Progress
from tests.adversary.verdict import Verdict
from tests.adversary.waiting import until

GIVE_UP_S = 90.0
"""Seconds after which a request counts as hung."""
_RETRY_S = 0.5
_ENDED_S = 2.0
"""Seconds within which the end of a gateway that broke a connection is noticed."""
_REFUSED = (429, 503)
_REASONS = {pb.FINISH_REASON_LENGTH: "length"}
"""All others are `stop` over HTTP."""


@dataclass(slots=True)
class Choice:
    """What has come of a choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None


@dataclass(slots=True)
class _Call:
    """One request, and what has come of it."""

    name: str
    body: dict[str, Any]
    reference: Completion
    found: dict[int, Choice] = field(default_factory=dict)


def as_json(body: api.GenerateRequest) -> dict[str, Any] | None:
    """The request over HTTP; None: it asks for what is not compared there."""
    sampling = body.sampling
    if sampling.HasField("prompt_logprobs") or body.HasField("speculation"):
        return None
    told: dict[str, Any] = {
        "prompt": body.prompt or list(body.prompt_token_ids.token_ids),
        "stream": True,
        "return_token_ids": True,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "n": sampling.n,
        "ignore_eos": sampling.ignore_eos,
    }
    for name in ("repetition_penalty", "frequency_penalty", "top_p", "top_k"):
        if sampling.HasField(name):
            told[name] = getattr(sampling, name)
    if sampling.stop:
        told |= {"stop": list(sampling.stop), "include_stop_str_in_output": sampling.include_stop_in_output}
    return told


def difference(found: dict[int, Choice], undisturbed: Completion) -> str | None:
    """What differs between an answer over HTTP and the undisturbed run, or None."""
    if sorted(found) != sorted(undisturbed.choices):
        return f"choices {sorted(found)} instead of {sorted(undisturbed.choices)}"
    for index, choice in found.items():
        other = undisturbed.choices[index]
        reason = None if other.finished is None else _REASONS.get(other.finished.reason, "stop")
        for what, ours, theirs in (
            ("token ids", choice.token_ids, other.token_ids),
            ("text", choice.text, other.text),
            ("finish_reason", choice.finish_reason, reason),
        ):
            if ours != theirs:
                return f"choice {index}: {what} {ours!r} instead of {theirs!r}"
    return None


class HttpClients:
    """All clients of gateways of a run; without any, `run` returns at once."""

    def __init__(
        self,
        fleet: Fleet,
        requests: Sequence[api.GenerateRequest],
        references: Sequence[Completion],
        progress: Progress,
        verdict: Verdict,
        seed: int,
    ) -> None:
        told = [(as_json(body), reference) for body, reference in zip(requests, references, strict=True)]
        self._pairs = [(body, reference) for body, reference in told if body is not None]
        self._fleet = fleet
        self._progress = progress
        self._verdict = verdict
        self._seed = seed
        self._ending = False

    def end(self) -> None:
        """Let all end with the request that they are at."""
        self._ending = True

    async def run(self) -> None:
        """Ask until `end`."""
        async with asyncio.TaskGroup() as group:
            for name in self._fleet.topology.http_clients:
                group.create_task(self._run_one(name), name=name)

    async def _run_one(self, name: str) -> None:
        rng, number, turn = random.Random(f"{self._seed} {name}"), 0, 0
        while not self._ending:
            async with httpx2.AsyncClient(base_url=self._fleet.url_for(name, turn), timeout=GIVE_UP_S) as client:
                is_there = True
                while is_there and not self._ending:
                    index = rng.randrange(len(self._pairs))
                    call = _Call(f"{name}/{number}/request {index}", *self._pairs[index])
                    number += 1
                    is_there = await self._ask(client, self._fleet.gateway_for(name, turn), call)
            turn += 1

    async def _ask(self, client: httpx2.AsyncClient, gateway: str, call: _Call) -> bool:
        """One request to its end, at another gateway if its own ends; returns whether its own is there."""
        self._progress.begin(call.name, max(1, len(call.reference.choices)))
        began_s, is_there = time.monotonic(), True
        try:
            async with asyncio.timeout(GIVE_UP_S):
                try:
                    error = await self._answered(client, call)
                except httpx2.HTTPError:

                    async def has_ended() -> bool:
                        return self._fleet.has_ended_since(gateway, began_s)

                    if not await until(has_ended, _ENDED_S):
                        raise
                    is_there = False
                    error = await self._answered_elsewhere(call)
        except TimeoutError:
            self._verdict.fail("hung", f"{call.name} has no end after {GIVE_UP_S:g} s")
        except httpx2.HTTPError as broken:
            self._verdict.fail("error", f"{call.name}: {broken!r}")
        else:
            if error is not None:
                self._verdict.fail("error", f"{call.name}: {error}")
            elif (wrong := difference(call.found, call.reference)) is not None:
                self._verdict.fail("unequal", f"{call.name}: {wrong}")
            else:
                self._verdict.num_equal += 1
                self._verdict.num_over_http += 1
        finally:
            self._progress.end(call.name)
        return is_there

    async def _answered_elsewhere(self, call: _Call) -> str | None:
        """Ask the next gateways from the beginning: with the same seed the answer is the same."""
        self._verdict.num_asked_again += 1
        client_name = call.name.partition("/")[0]
        for turn in itertools.count(1):
            call.found.clear()
            with contextlib.suppress(httpx2.HTTPError):
                async with httpx2.AsyncClient(
                    base_url=self._fleet.url_for(client_name, turn), timeout=GIVE_UP_S
                ) as client:
                    return await self._answered(client, call)
            await asyncio.sleep(_RETRY_S)
        raise AssertionError("it counts for ever")

    async def _answered(self, client: httpx2.AsyncClient, call: _Call) -> str | None:
        """Ask until an answer has begun, and read it; returns its error, or None."""
        error: str | None = ""
        while error == "":
            error = await self._read(client, call.name, call.body, call.found)
            await asyncio.sleep(_RETRY_S if error == "" else 0.0)
        return error

    async def _read(
        self, client: httpx2.AsyncClient, name: str, body: dict[str, Any], found: dict[int, Choice]
    ) -> str | None:
        """Read an answer. Returns its error; "" if it was refused before it began, None at its end."""
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code in _REFUSED:
                self._verdict.refusals[f"HTTP {answer.status_code}"] += 1
                return ""
            if answer.status_code != 200:
                return f"{answer.status_code} {(await answer.aread())!r}"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return None
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return self._refused_late(event["error"], found)
                    self._take(name, event, found)
        return "the stream ended without [DONE]"

    def _refused_late(self, error: dict[str, Any], found: dict[int, Choice]) -> str:
        """Headers are sent before a place is free: a refusal may then be an event."""
        if not found and error.get("code") in ("rate_limit_exceeded", "service_unavailable"):
            self._verdict.refusals[f"HTTP event {error['code']}"] += 1
            return ""
        return str(error)

    def _take(self, name: str, event: dict[str, Any], found: dict[int, Choice]) -> None:
        for told in event["choices"]:
            choice = found.setdefault(told["index"], Choice())
            choice.token_ids += told.get("token_ids") or []
            choice.text += told["text"]
            choice.finish_reason = told["finish_reason"] or choice.finish_reason
            self._progress.move(name, told["index"], is_end=told["finish_reason"] is not None)
