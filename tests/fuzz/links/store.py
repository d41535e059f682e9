"""What Redis holds, spoilt by whoever can write there, to a coordinator: registry, prefix map, journal, quotas."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import redis

from specdec.coordinator.intake.callers import TENANT_KEY
from specdec.store.interface import RequestKey
from specdec.store.keys import StoreKeys
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.backoff import Backoff
from tests.fuzz.cases import Case, Link, Run
from tests.fuzz.extremes import TEXTS
from tests.fuzz.judge import Complaints, check_status, within
from tests.fuzz.links.client import Beside, good_answer, short_target
from tests.fuzz.mutations import mutated
from tests.support.scripted.model import identity
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.redis_server import RedisServer
from tests.support.services.coordinator_harness import Harness, Result, collect, request, resumed, running

_MOST_S = 20.0
_TENANT = "spoilt"
_AS_TENANT = ((TENANT_KEY, _TENANT),)
_KEYS = StoreKeys()
_NUMBERS = (
    "-inf", "inf", "nan", "-nan", "1e308", "-1e308", "1e-320", "-0", "0", "0x10", "-1", "1", "1e15", "-1e15", "9" * 400,
    "9007199254740993", "18446744073709551616", "-9223372036854775809", "4294967296", "1000000000",
)  # fmt: skip
_VALUES = (*(number.encode() for number in _NUMBERS), *(text.encode("utf-8", "surrogatepass") for text in TEXTS),
           b"\xff\xfe", b"\0" * 7, b"\xff" * 5000)  # fmt: skip
_SCORES = ("inf", "-inf", "0", "-1", "1e308", "99999999999999")
_DEPTH = 100_000
_JSON = (
    "[" * _DEPTH, '{"a":' * _DEPTH, "[]", "{}", "null", "1e999", "NaN", "9" * 5000, '"\\ud800"',
    '{"role": ' + "[" * _DEPTH,
)  # fmt: skip
_NAMES = (*TEXTS, "\ud800:80", "127.0.0.1:0", "[::1]:1", "unix:/x:1", "\ud800", None, 1, 1e999, [], {"a": 1})
_ADDRESS = "127.0.0.1:1"
_RECORD_FIELDS = ("owner", "generation", "seed", "params", "num_choices", "ended", "aborted", "lease", "lease_until")


class Meddler:
    """Writes to a Redis what no coordinator of ours would, and takes it away again."""

    def __init__(self, client: redis.Redis, ended: RequestKey) -> None:
        """`ended` is a request in the journal."""
        self._client = client
        self._request_key, self._live_key = _KEYS.request(ended)
        self._kinds = (self._registry, self._prefixes, self._journal, self._quota, self._quota)

    def meddle(self, rng: random.Random, case: Case, digests: list[bytes]) -> Callable[[], None]:
        """Spoil something; returns how to undo it."""
        before = {key: self._client.dump(key) for key in self._client.scan_iter()}
        rng.choice(self._kinds)(rng, case, digests)

        def undo() -> None:
            self._client.flushdb()
            for key, value in before.items():
                if value is not None:
                    self._client.restore(key, 600_000, value, replace=True)  # type: ignore[arg-type]

        return undo

    def _registry(self, rng: random.Random, case: Case, digests: list[bytes]) -> None:
        expiries, records = _KEYS.replicas()
        if rng.random() < 0.1:
            self._of_wrong_type(rng.choice([expiries, records]), case)
            return
        fields: dict[str, Any] = {
            "role": rng.choice(["target", "draft", "coordinator"]), "address": _ADDRESS, "instance_id": "i",
            "state": rng.choice(["ready", "loading", "draining"]), "info": "",
        }  # fmt: skip
        if rng.random() < 0.4:
            info = pb.GetReplicaInfoResponse(identity=identity(), version="1", load=pb.LoadReport(num_running=1))
            mutation = mutated(rng, info)
            fields["info"] = base64.b64encode(case.sent(mutation.apply())).decode()
            case.what.append(f"a registration's info: {mutation.what}")
        elif rng.random() < 0.7:
            field = rng.choice(list(fields))
            fields[field] = rng.choice(_NAMES)
            case.what.append(f"a registration's {field} = {str(fields[field])[:40]!a}")
        record = json.dumps(fields)
        if rng.random() < 0.2:
            record = rng.choice(_JSON)
            case.what.append(f"a registration: {record[:40]}")
        score = rng.choice(_SCORES) if rng.random() < 0.2 else "inf"
        self._client.zadd(expiries, {"spoilt": float(score)})
        self._client.hset(records, "spoilt", record)

    def _prefixes(self, rng: random.Random, case: Case, digests: list[bytes]) -> None:
        (key,) = _KEYS.prefix_holders(rng.choice(digests))
        if rng.random() < 0.2:
            self._of_wrong_type(key, case)
            return
        holder, score = rng.choice(_VALUES), rng.choice(_SCORES)
        case.what.append(f"a prefix's holder {holder[:40]!r} till {score}")
        self._client.zadd(key, {holder: float(score)})

    def _journal(self, rng: random.Random, case: Case, digests: list[bytes]) -> None:
        kind = rng.random()
        if kind < 0.1:
            self._of_wrong_type(rng.choice([self._request_key, self._live_key, f"{self._request_key}:tokens:0"]), case)
        elif kind < 0.2:
            self._client.zadd(self._live_key, {rng.choice(_VALUES): float(rng.choice(_SCORES))})
            case.what.append("a tenant's live requests")
        elif kind < 0.4:
            value = rng.choice(_VALUES)
            self._client.set(f"{self._request_key}:tokens:0", value)
            case.what.append(f"the tokens of a request = {value[:40]!r}")
        else:
            field, value = rng.choice(_RECORD_FIELDS), rng.choice(_VALUES)
            self._client.hset(self._request_key, mapping={field: value, "ended": rng.choice(["0", "1"])})
            if rng.random() < 0.2:
                self._client.hdel(self._request_key, field)
            case.what.append(f"{field} of a request = {value[:40]!r}")

    def _quota(self, rng: random.Random, case: Case, digests: list[bytes]) -> None:
        (key,) = _KEYS.quota(_TENANT)
        if rng.random() < 0.1:
            self._of_wrong_type(key, case)
            return
        level, at = rng.choice(_VALUES), rng.choice(_VALUES)
        if rng.random() < 0.5:
            level, at = rng.choice(_NUMBERS).encode(), b"0"
        self._client.hset(key, mapping={"level": level, "at": at})
        case.what.append(f"a quota's level {level[:40]!r} at {at[:40]!r}")

    def _of_wrong_type(self, key: str, case: Case) -> None:
        self._client.delete(key)
        self._client.lpush(key, "x")
        case.what.append(f"{key} is a list")


class Tenant:
    """Whose entries are spoilt: asks for all that reads them."""

    def __init__(self, harness: Harness, ended: Result, body: api.GenerateRequest) -> None:
        self._harness = harness
        self._again = resumed(ended, body)

    async def ask(self, rng: random.Random) -> None:
        """Nothing that is asked hangs, or fails without a type."""
        registry = self._harness.service.registry_view
        assert registry is not None
        await within(_MOST_S, registry.refresh(), "a look at the registry")
        status = self._harness.stub.GetStatus(api.GetStatusRequest(), metadata=_AS_TENANT)
        await within(_MOST_S, self._outcome(status), "GetStatus")
        seed = rng.randrange(1000)
        await within(
            _MOST_S, self._outcome(self._harness.stub.Generate(request(seed=seed), metadata=_AS_TENANT)), "one"
        )
        resume = self._harness.stub.Generate(self._again, metadata=_AS_TENANT)
        await within(_MOST_S, self._outcome(resume), "a resume")
        abort = api.AbortRequest(request_id=self._again.request_id)
        await within(_MOST_S, self._outcome(self._harness.stub.Abort(abort, metadata=_AS_TENANT)), "Abort")

    @staticmethod
    async def _outcome(call: Any) -> None:
        try:
            await (collect(call) if hasattr(call, "read") else call)
        except grpc.aio.AioRpcError as error:
            check_status(error.code(), error.trailing_metadata() or (), frozenset())  # type: ignore[arg-type]


@asynccontextmanager
async def opened(complaints: Complaints) -> AsyncIterator[Run]:
    """A coordinator with a Redis; one tenant's entries are spoilt, another must not notice."""
    target = short_target()
    with tempfile.TemporaryDirectory(prefix="specdec-fuzz-") as folder, RedisServer(Path(folder)) as server:
        settings = {
            "redis_url": server.url, "redis_timeout_s": 5.0, "discovery_s": 0.2, "quota_tokens_per_s": 1e6,
            "journal_keep_s": 600.0, "credit_window_tokens": 2,
        }  # fmt: skip
        async with running([target], **settings) as harness:
            # Else it would not look at Redis for seconds after a case, and the next ones would try nothing.
            harness.service.store._backoff = Backoff(first_s=0.001, longest_s=0.001)
            body = request(request_id="ended", max_tokens=6)
            ended = await collect(harness.stub.Generate(body, metadata=_AS_TENANT))
            with server.client() as client:
                meddler = Meddler(client, RequestKey(_TENANT, "ended"))
                yield _runs(harness, target, meddler, Tenant(harness, ended, body))


def _runs(harness: Harness, target: ScriptedTarget, meddler: Meddler, tenant: Tenant) -> Run:
    digests = [bytes([number]) * 32 for number in range(4)]
    beside = Beside(harness, target)

    async def run(case: Case) -> None:
        undo = await asyncio.to_thread(meddler.meddle, case.rng, case, digests)
        try:
            await tenant.ask(case.rng)
            shared = harness.service._shared_prefixes
            assert shared is not None
            await within(_MOST_S, shared.lengths(digests), "the prefix map")
            await beside.go_on()
            await good_answer(harness, target, _MOST_S)
        finally:
            await asyncio.to_thread(undo)
        await _until_up(harness)

    return run


async def _until_up(harness: Harness) -> None:
    """The store is in use again as soon as what it holds is as it was."""
    async with asyncio.timeout(_MOST_S):
        while not harness.service.store.is_up:
            try:
                await harness.service.store.ping()
            except Exception:
                await asyncio.sleep(0.01)


LINK = Link("store", opened)
