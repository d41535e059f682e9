"""Requests to a coordinator and their results.

Every run is its own tenant. Tenants share no cached prefixes, so every prompt is computed in every run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from specdec.client import Client, ClientSettings, Completion
from specdec.config.generation_config import neutral_sampling
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

Prompt = tuple[int, ...] | str
"""Token ids or text."""
_MODES = {"coupled": pb.VERIFY_MODE_COUPLED, "rejection": pb.VERIFY_MODE_REJECTION}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Fields that all requests of a measurement share."""

    temperature: float = 0.0
    max_tokens: int = 128
    """Tokens that every request decodes, past end-of-sequence tokens unless `stop_at_eos`."""
    stop_at_eos: bool = False
    max_draft_tokens: int | None = None
    """Draft tokens per step; None: the deployment's setting."""
    verify_mode: str | None = "coupled"
    """None: the deployment's mode."""
    model: str = ""
    """Name of the model; empty: the served one."""
    with_steps: bool = False
    """Whether the answer reports each step, which takes time."""

    @property
    def is_reproducible(self) -> bool:
        """Whether speculation may change no token; false if the deployment's mode is used, which is unknown here."""
        return self.verify_mode == "coupled" or self.temperature == 0


@dataclass(frozen=True, slots=True)
class Run:
    """A group of requests that ran at once."""

    tokens_per_s: float
    completions: Sequence[Completion]

    @property
    def token_ids(self) -> list[list[int]]:
        """Output tokens of every request."""
        return [completion.choices[0].token_ids for completion in self.completions]


def make_request(prompt: Prompt, sampling: Sampling, seed: int, *, speculate: bool) -> api.GenerateRequest:
    """A request whose output depends on these arguments only."""
    request = api.GenerateRequest(model=sampling.model)
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.prompt_token_ids.token_ids.extend(prompt)
    request.sampling.CopyFrom(neutral_sampling())
    request.sampling.temperature = sampling.temperature
    request.sampling.seed = seed
    request.sampling.max_tokens = sampling.max_tokens
    request.sampling.ignore_eos = not sampling.stop_at_eos
    request.with_steps = sampling.with_steps
    request.speculation.enabled = speculate
    if sampling.verify_mode is not None:
        request.speculation.verify_mode = _MODES[sampling.verify_mode]
    if sampling.max_draft_tokens is not None:
        request.speculation.max_draft_tokens = sampling.max_draft_tokens
    return request


@asynccontextmanager
async def new_tenant(address: str, settings: ClientSettings | None = None) -> AsyncIterator[Client]:
    """A connected client whose tenant has no cached prompts; with an API key the tenant is the key's, and may have."""
    settings = settings or ClientSettings()
    if settings.api_key is None:
        metadata = (*settings.metadata, ("specdec-tenant", f"bench-{secrets.token_hex(8)}"))
        settings = dataclasses.replace(settings, metadata=metadata)
    async with Client(address, settings) as client:
        await client.status()
        yield client


async def run_group(address: str, prompts: Sequence[Prompt], sampling: Sampling, *, speculate: bool) -> Run:
    """Run requests at once: see `run_requests`."""
    return await run_requests(
        address, [make_request(prompt, sampling, seed, speculate=speculate) for seed, prompt in enumerate(prompts)]
    )


async def run_requests(address: str, requests: Sequence[api.GenerateRequest]) -> Run:
    """Run requests at once. A single one is timed from first to last token; several from their start."""
    async with new_tenant(address) as client:
        began_s = time.perf_counter()
        completions = await asyncio.gather(*(client.complete(request) for request in requests))
        elapsed_s = time.perf_counter() - began_s
    if len(requests) == 1:
        speed = completions[0].tokens_per_second or 0.0
    else:
        speed = sum(completion.num_tokens for completion in completions) / elapsed_s
    return Run(speed, completions)
