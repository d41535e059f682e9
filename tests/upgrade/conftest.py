"""The last release beside this version: `last` and `this`, and a fleet with a target and a draft of each."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.releases import Build, install, last_release, this_version
from tests.support.servers.redis_server import RedisServer
from tests.support.services.mixed_fleet import MixedFleet
from tests.support.services.model_pair import ModelPair

_KERNELS = "specdec/engine/native/kernels.py"


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Build]:
    """Both versions, as `last` and `this`."""
    return {"last": install(last_release(), tmp_path_factory.mktemp("last_release")), "this": this_version()}


@pytest.fixture(scope="session")
def common_numerics(builds: Mapping[str, Build]) -> Mapping[str, object]:
    """Settings with which engines of both versions have the same numerics: none, unless kernels have changed since."""
    versions = {re.findall(r"(?m)^KERNEL_VERSION = .*$", (b.folder / _KERNELS).read_text())[0] for b in builds.values()}
    return {} if len(versions) == 1 else {"native": "off"}


@pytest.fixture(scope="session")
def upgrade_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The Redis of `mixed_fleet`."""
    with RedisServer(tmp_path_factory.mktemp("upgrade_redis")) as server:
        yield server


@pytest.fixture(scope="session")
def mixed_fleet(
    builds: Mapping[str, Build],
    common_numerics: Mapping[str, object],
    tiny_pair: ModelPair,
    upgrade_redis: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[MixedFleet]:
    """`target-last`, `target-this`, `draft-last` and `draft-this`, to add coordinators to; none of the four may end."""
    with MixedFleet(tiny_pair, tmp_path_factory.mktemp("mixed_fleet"), upgrade_redis.url) as fleet:
        for role in ("target", "draft"):
            for name, build in builds.items():
                fleet.add(f"{role}-{name}", build, **common_numerics)
        asyncio.run(fleet.start(*fleet.builds))
        yield fleet


@pytest.fixture
def alone(
    builds: Mapping[str, Build], tiny_pair: ModelPair, redis_server: RedisServer, tmp_path: Path
) -> Iterator[MixedFleet]:
    """A fleet of the test's own, with a Redis of its own, that has no service yet."""
    with MixedFleet(tiny_pair, tmp_path / "fleet", redis_server.url) as fleet:
        yield fleet


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own."""
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder) as server:
        yield server
