"""Authenticate callers by API keys from a file of hashes, which may change without a restart.

The file holds the SHA-256 of each key, and no key. A fast hash is enough: keys are random, with 256 bits, and cannot
be guessed. A slow hash, as for passwords, would cost every call tens of milliseconds, and attackers could make us
spend them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self

import structlog
import yaml
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from specdec.coordinator.tenants.quotas import Allowance, QuotaRate
from specdec.service.texts import read_text
from specdec.wire.errors import NotReady, PermissionDenied, Unauthenticated

AUTHORIZATION_KEY = "authorization"
"""Metadata key whose value is `Bearer KEY`."""
_CHECK_INTERVAL_S = 1.0
"""Seconds between two looks at the file, during which a withdrawn key still works."""
_log = structlog.get_logger(__name__)

_Signature = tuple[int, int, int, int]
_Positive = Annotated[int, Field(ge=1)]


class ApiKey(BaseModel):
    """An entry of the file. The deployment's settings apply to missing limits."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    """Name of the key for people; it may be logged."""
    tenant: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._@:/-]{1,128}$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")] = Field(repr=False)
    """SHA-256 of the key's UTF-8, in hexadecimal."""
    expires_at: AwareDatetime | None = None
    max_prompt_tokens: _Positive | None = None
    max_tokens: _Positive | None = None
    max_concurrent_requests: _Positive | None = None
    tokens_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    burst_tokens: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    weight: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] = 1.0

    @model_validator(mode="after")
    def _check_burst(self) -> Self:
        if self.burst_tokens is not None and self.tokens_per_s is None:
            raise ValueError("burst_tokens needs tokens_per_s")
        return self

    def allowance(self, default: Allowance) -> Allowance:
        """Limits of the key's holder."""

        def own_or(own: int | None, other: int | None) -> int | None:
            return other if own is None else own

        return Allowance(
            max_prompt_tokens=own_or(self.max_prompt_tokens, default.max_prompt_tokens),
            max_tokens=own_or(self.max_tokens, default.max_tokens),
            max_concurrent_requests=own_or(self.max_concurrent_requests, default.max_concurrent_requests),
            quota=QuotaRate.of(self.tokens_per_s, self.burst_tokens) or default.quota,
            weight=self.weight,
        )


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    keys: list[ApiKey]

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        ids: set[str] = set()
        digests: dict[str, str] = {}
        of_tenant: dict[str, ApiKey] = {}
        for key in self.keys:
            if key.id in ids:
                raise ValueError(f"two keys have the id {key.id}")
            ids.add(key.id)
            other = digests.setdefault(key.sha256.lower(), key.id)
            if other != key.id:
                raise ValueError(f"{other} and {key.id} are the same key")
            first = of_tenant.setdefault(key.tenant, key)
            for name in ("max_concurrent_requests", "tokens_per_s", "burst_tokens", "weight"):
                if getattr(first, name) != getattr(key, name):
                    raise ValueError(f"{first.id} and {key.id} are of one tenant but differ in {name}")
        return self


class KeyFileInvalid(Exception):
    """The file of API keys is invalid; the message says where and why, and quotes nothing of the file."""


def read_key_file(path: Path) -> list[ApiKey]:
    """Read a file of keys: JSON if its name ends in .json, otherwise YAML.

    Raises:
        KeyFileInvalid: it cannot be read or is invalid.
    """
    try:
        text = read_text(path)
        content: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        return _KeyFile.model_validate(content).keys
    except OSError as error:
        raise KeyFileInvalid(f"cannot be read: {error.strerror}") from None
    except ValidationError as error:
        found = error.errors(include_input=False, include_context=False, include_url=False)
        raise KeyFileInvalid("; ".join(_describe(p["loc"], p["msg"]) for p in found)) from None
    except yaml.MarkedYAMLError as error:  # its text quotes the line, which may hold a key
        mark = error.problem_mark
        raise KeyFileInvalid("does not parse" + (f" (line {mark.line + 1})" if mark is not None else "")) from None
    except (ValueError, yaml.YAMLError):
        raise KeyFileInvalid("does not parse") from None


def _describe(location: Iterable[int | str], message: str) -> str:
    # Unknown names are left out: someone may have put a key in their place.
    known = {"keys", *ApiKey.model_fields}
    path = ".".join(str(part) if isinstance(part, int) or part in known else "(unknown name)" for part in location)
    message = message.removeprefix("Value error, ")
    return f"{path}: {message}" if path else message


class ApiKeys:
    """The keys of a file that may change at any time.

    The file is checked at most once per second, before a key is looked up, and read again if it was replaced or
    written; symbolic links are followed, as Kubernetes swaps them when a secret changes. An invalid file is logged,
    and the former keys stay.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Read nothing before `load`. `clock`: monotonic seconds; `now`: the time to check expiry."""
        self._path = path
        self._clock = clock
        self._now = now
        self._keys: list[tuple[bytes, ApiKey]] | None = None
        self._signature: _Signature | None = None
        self._checked_s = -float("inf")

    def load(self) -> None:
        """Read the file for the first time.

        Raises:
            KeyFileInvalid: it cannot be read or is invalid.
        """
        self._checked_s, self._signature = self._clock(), self._look()
        self._take(read_key_file(self._path))

    def authenticate(self, key: str) -> ApiKey:
        """The entry of a key.

        Raises:
            Unauthenticated: unknown (INVALID_API_KEY) or expired (API_KEY_EXPIRED).
            NotReady: `load` has not been called.
        """
        self._reload_if_changed()
        if self._keys is None:
            raise NotReady("the API keys are not loaded yet")
        digest = hashlib.sha256(key.encode()).digest()
        found: ApiKey | None = None
        for stored, entry in self._keys:  # compare all, so that the time does not depend on the key
            if hmac.compare_digest(stored, digest):
                found = entry
        if found is None:
            raise Unauthenticated("the API key is unknown", reason="INVALID_API_KEY")
        if found.expires_at is not None and found.expires_at <= self._now():
            raise Unauthenticated("the API key has expired", reason="API_KEY_EXPIRED")
        return found

    def _reload_if_changed(self) -> None:
        now_s = self._clock()
        if self._keys is None or now_s - self._checked_s < _CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        signature = self._look()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._take(read_key_file(self._path))
        except KeyFileInvalid as error:
            _log.error("api_keys_not_reloaded", file=str(self._path), cause=str(error), num_keys=len(self._keys))

    def _take(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(bytes.fromhex(key.sha256), key) for key in keys]
        _log.info("api_keys_loaded", file=str(self._path), num_keys=len(keys))

    def _look(self) -> _Signature | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


class Authenticator:
    """Finds the tenant and the allowance of a call by its metadata."""

    def __init__(self, keys: ApiKeys | None, default: Allowance) -> None:
        """Without `keys` callers name their own tenant, and all have the default allowance."""
        self._keys = keys
        self._default = default

    def identify(self, authorization: Sequence[str], claimed_tenant: str | None) -> tuple[str, Allowance]:
        """Tenant and allowance of a caller.

        Args:
            authorization: all `authorization` values in the call's metadata.
            claimed_tenant: the tenant named in the metadata, if any.

        Raises:
            Unauthenticated: the key is missing (NO_API_KEY), unknown or expired.
            PermissionDenied: the named tenant is not the key's (WRONG_TENANT).
        """
        if self._keys is None:
            return claimed_tenant or "", self._default
        scheme, _, key = authorization[0].partition(" ") if len(authorization) == 1 else ("", "", "")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthenticated("send `authorization: Bearer KEY` once", reason="NO_API_KEY")
        entry = self._keys.authenticate(key.strip())
        if claimed_tenant is not None and claimed_tenant != entry.tenant:
            raise PermissionDenied("specdec-tenant names another tenant than the API key's", reason="WRONG_TENANT")
        return entry.tenant, entry.allowance(self._default)
