"""Services that can be audited: a coordinator, or a server with OpenAI's completions that returns token ids."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from specdec.client import Client
from specdec.config.generation_config import neutral_sampling
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

_MOST_BYTES = 16 * 2**20
"""Bytes of an answer."""


class AuditImpossible(Exception):
    """The service cannot be audited; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAnswer:
    """What came back for a prompt."""

    token_ids: Sequence[int]
    num_drafted: int = 0
    """Verified draft tokens; 0 if the service does not report them."""
    num_accepted: int = 0
    has_ended: bool = False
    """Whether it ended with an end-of-sequence token, which may be missing in the ids."""


class AuditedService(Protocol):
    """Answers prompts."""

    name: str
    """Name in reports."""
    tells_drafts: bool
    """Whether its answers report draft tokens."""

    async def complete(
        self, prompt: Sequence[int], *, num_tokens: int, temperature: float, seed: int, speculate: bool = True
    ) -> ServiceAnswer:
        """An answer. Raises AuditImpossible, or the typed errors of `specdec.wire.errors`."""
        ...


class OwnService:
    """A coordinator."""

    tells_drafts = True

    def __init__(self, client: Client, model: str = "") -> None:
        self.name = f"specdec at {client.address}"
        self._client, self._model = client, model

    async def complete(
        self, prompt: Sequence[int], *, num_tokens: int, temperature: float, seed: int, speculate: bool = True
    ) -> ServiceAnswer:
        """Complete a prompt, past end-of-sequence tokens."""
        request = api.GenerateRequest(model=self._model)
        request.prompt_token_ids.token_ids.extend(prompt)
        request.sampling.CopyFrom(neutral_sampling())
        request.sampling.MergeFrom(
            api.SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True)
        )
        request.speculation.enabled = speculate
        completion = await self._client.complete(request)
        stats = completion.require_finished().stats
        return ServiceAnswer(
            token_ids=completion.choices[0].token_ids, num_drafted=stats.num_proposed, num_accepted=stats.num_accepted
        )


class OpenAIServer:
    """A server with OpenAI's completions that takes and returns token ids, such as vLLM."""

    tells_drafts = False

    def __init__(self, url: str, model: str, *, api_key: str | None, timeout_s: float) -> None:
        """`url` ends with the version: https://host/v1. Raises AuditImpossible if it is no URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise AuditImpossible(f"{url} is no URL of a server")
        self._url = url.rstrip("/") + "/completions"
        self.name = f"{model} at {url}"
        self._model, self._timeout_s = model, timeout_s
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._opener = urllib.request.build_opener(_NoRedirects)

    async def complete(
        self, prompt: Sequence[int], *, num_tokens: int, temperature: float, seed: int, speculate: bool = True
    ) -> ServiceAnswer:
        """Complete a prompt; the server ignores `speculate`."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": temperature,
            "seed": seed,
            "return_token_ids": True,
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
        }
        return _answer(await asyncio.to_thread(self._post, body))

    def _post(self, body: Mapping[str, object]) -> Any:
        request = urllib.request.Request(self._url, json.dumps(body).encode(), self._headers)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                content = response.read(_MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            said = error.read(500).decode("utf-8", "replace")
            raise AuditImpossible(f"{self._url} answers {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            raise AuditImpossible(f"{self._url} does not answer: {error}") from error
        if len(content) > _MOST_BYTES:
            raise AuditImpossible(f"{self._url} answers with more than {_MOST_BYTES} bytes")
        try:
            return json.loads(content)
        except ValueError as error:
            raise AuditImpossible(f"{self._url} does not answer in JSON") from error


def _answer(content: Any) -> ServiceAnswer:
    try:
        choice = content["choices"][0]
        ids = choice.get("token_ids")
        if ids is None:
            names = (choice.get("logprobs") or {}).get("tokens") or []
            if not names or not all(str(name).startswith("token_id:") for name in names):
                message = (
                    "the server returns no token ids (return_token_ids, return_tokens_as_token_ids), and one text "
                )
                raise AuditImpossible(message + "may be several sequences of tokens")
            ids = [int(name.removeprefix("token_id:")) for name in names]
        token_ids = [int(token) for token in ids]
        return ServiceAnswer(token_ids=token_ids, has_ended=choice.get("finish_reason") == "stop")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise AuditImpossible(f"the server's answer is no completion: {error!r}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Refuse, so that the API key is sent to no other server."""
        return


def is_reproducible(info: api.GetModelInfoResponse) -> bool:
    """Whether a coordinator's tokens of a seed are equal with and without speculation."""
    return info.target.row_invariant and info.default_verify_mode == pb.VERIFY_MODE_COUPLED
