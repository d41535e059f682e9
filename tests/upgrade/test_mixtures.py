"""Coordinator, target and draft of two versions, in every mixture: every answer is the one that one version gives."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping

import pytest
from google.protobuf import descriptor_pb2

from specdec.client import Client
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import FailedPrecondition, InvalidRequest, SpecdecError
from tests.support.releases import Build, last_release
from tests.support.services.client_process import ClientProcess
from tests.support.services.every_request import Answer, every_request, fields_set
from tests.support.services.faults import make_request, speculated
from tests.support.services.mixed_fleet import MixedFleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

VERSIONS = ("last", "this")
MIXTURES = list(itertools.product(VERSIONS, repeat=3))
ANSWER_S = 120.0
UNIFORM = ("last", "last", "last")
REQUESTS = every_request()
NOT_HERE = {"request_id", "model", "resume"}
"""Asked for by the other tests of this folder, or by every client."""


def coordinator_of(mixture: tuple[str, str, str]) -> str:
    return f"coordinator-{'-'.join(mixture)}"


def describe(mixture: tuple[str, str, str], builds: Mapping[str, Build]) -> str:
    roles = zip(("coordinator", "target", "draft"), mixture, strict=True)
    return ", ".join(f"{role} {builds[version]}" for role, version in roles)


@pytest.fixture(scope="module")
def fleet(mixed_fleet: MixedFleet, builds: Mapping[str, Build]) -> Iterator[MixedFleet]:
    """`mixed_fleet` with a coordinator for each mixture, which knows one target and one draft."""
    for mixture in MIXTURES:
        coordinator, target, draft = mixture
        mixed_fleet.add(
            coordinator_of(mixture),
            builds[coordinator],
            redis_url=None,
            targets=[mixed_fleet.address(f"target-{target}")],
            drafts=[mixed_fleet.address(f"draft-{draft}")],
        )
    names = [coordinator_of(mixture) for mixture in MIXTURES]
    asyncio.run(mixed_fleet.start(*names))
    for coordinator, mixture in zip(names, MIXTURES, strict=True):
        replicas = (f"target-{mixture[1]}", f"draft-{mixture[2]}")
        asyncio.run(mixed_fleet.until_ready(coordinator, *replicas))
    yield mixed_fleet
    for name in names:
        mixed_fleet.kill(name)


async def answers(address: str, what: str) -> dict[str, Answer]:
    """All answers of a coordinator, asked for at once; an error names the request, and who is of which version."""
    async with Client(address) as client:

        async def answer(name: str, body: api.GenerateRequest) -> Answer:
            try:
                async with asyncio.timeout(ANSWER_S):
                    return Answer.of(await client.complete(body))
            except TimeoutError:
                pytest.fail(f"{what}: no answer within {ANSWER_S:g} s to the request {name!r}")
            except SpecdecError as error:
                pytest.fail(f"{what}: {type(error).__name__} {error.reason} for the request {name!r}: {error}")

        found = await asyncio.gather(*(answer(name, body) for name, body in REQUESTS.items()))
    return dict(zip(REQUESTS, found, strict=True))


@pytest.fixture(scope="module")
def undisturbed(fleet: MixedFleet, builds: Mapping[str, Build]) -> dict[str, Answer]:
    """What the last release answers by itself."""
    return asyncio.run(answers(fleet.address(coordinator_of(UNIFORM)), describe(UNIFORM, builds)))


def assert_equal(found: Mapping[str, Answer], wanted: Mapping[str, Answer], what: str) -> None:
    differences = {name: found[name].difference(wanted[name]) for name in wanted}
    told = [f"  {name}: {difference}" for name, difference in differences.items() if difference is not None]
    if told:
        pytest.fail("\n".join([f"{what}: answers differ from those of {last_release().version} alone", *told]))


def test_every_field_that_the_last_release_has_is_asked_for() -> None:
    image = descriptor_pb2.FileDescriptorSet.FromString(last_release().protos.read_bytes())
    (file,) = (file for file in image.file if file.name.endswith("/coordinator.proto"))
    messages = {message.name: {field.name for field in message.field} for message in file.message_type}
    released = messages["GenerateRequest"] - NOT_HERE
    released |= {f"sampling.{name}" for name in messages["SamplingParams"]}
    released |= {f"speculation.{name}" for name in messages["SpeculationParams"]}
    assert set().union(*(fields_set(body) for body in REQUESTS.values())) == released


@pytest.mark.parametrize("mixture", [m for m in MIXTURES if m != UNIFORM], ids="-".join)
async def test_every_answer_is_that_of_one_version_alone(
    mixture: tuple[str, str, str], fleet: MixedFleet, builds: Mapping[str, Build], undisturbed: dict[str, Answer]
) -> None:
    what, address = describe(mixture, builds), fleet.address(coordinator_of(mixture))
    assert_equal(await answers(address, what), undisturbed, what)
    async with Client(address) as client:
        sampled = await speculated(client, REQUESTS["sampled, three choices"])
        assert Answer.of(sampled) == undisturbed["sampled, three choices"], what


@pytest.mark.parametrize("mixture", [m for m in MIXTURES if len({*m}) > 1], ids="-".join)
async def test_drawn_drafts_are_verified_by_rejection_across_versions(
    mixture: tuple[str, str, str], fleet: MixedFleet, builds: Mapping[str, Build]
) -> None:
    """Which tokens come out depends on the draft; that some of its tokens are taken, and none is missing, does not."""
    body = make_request(max_tokens=100, temperature=1.0)
    body.speculation.verify_mode = pb.VERIFY_MODE_REJECTION
    async with Client(fleet.address(coordinator_of(mixture))) as client:
        completion = await speculated(client, body)
    assert len(completion.choices[0].token_ids) == 100, describe(mixture, builds)


@pytest.mark.parametrize("mixture", MIXTURES, ids="-".join)
async def test_a_constraint_holds_or_is_refused(
    mixture: tuple[str, str, str], fleet: MixedFleet, builds: Mapping[str, Build]
) -> None:
    """The last release knows none: its targets get no such request, its coordinators are found out by the client."""
    body = make_request(max_tokens=40, temperature=1.0)
    body.sampling.constraint.choice.texts.extend(["red", "green"])
    coordinator, target, _ = mixture
    async with Client(fleet.address(coordinator_of(mixture))) as client:
        if mixture[:2] == ("this", "this"):
            answer = await client.complete(body)
            assert answer.choices[0].text in ("red", "green"), describe(mixture, builds)
            return
        with pytest.raises(FailedPrecondition if coordinator == "last" else InvalidRequest) as error:
            await client.complete(body)
        assert error.value.reason == "CONSTRAINTS_UNKNOWN", (target, describe(mixture, builds))


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_client_of_the_last_release_gets_every_answer(
    version: str, fleet: MixedFleet, builds: Mapping[str, Build], undisturbed: dict[str, Answer]
) -> None:
    """`undisturbed` came by a client of this version."""
    mixture = (version, version, version)
    async with ClientProcess(builds["last"], fleet.address(coordinator_of(mixture)), REQUESTS) as client:
        await client.have_begun()
        found = await client.answers()
    assert_equal(found, undisturbed, f"client {builds['last']}, {describe(mixture, builds)}")


async def test_numerics_ids_agree_as_long_as_kernels_are_the_same(
    mixed_fleet: MixedFleet, common_numerics: Mapping[str, object]
) -> None:
    last, this = [await mixed_fleet.identity(f"target-{version}") for version in VERSIONS]
    assert last.numerics_id == this.numerics_id, f"with {dict(common_numerics)}; {mixed_fleet}"
    assert last.row_invariant and this.row_invariant
    assert this.constraints_id and not last.constraints_id
    assert this.config_digest and not last.config_digest
    last.numerics_id = this.numerics_id = this.constraints_id = this.config_digest = ""
    assert this.HasField("sampling_defaults")
    this.ClearField("sampling_defaults")
    assert last == this, str(mixed_fleet)
