"""Who owns which session: attachment, leases, orphans and their end."""

from __future__ import annotations

import pytest

from specdec.replica.worker.sessions import EngineSession, EngineSessionTable, Owner, StaleLease

TTL_S = 60.0


def table_with(owner_id: str = "a", stream_id: int = 1, lease: int = 5) -> tuple[EngineSessionTable, Owner]:
    table = EngineSessionTable(TTL_S)
    owner, former = table.attach(stream_id, owner_id, lease)
    assert former is None
    return table, owner


def add(table: EngineSessionTable, owner: Owner, session_id: str, epoch: int = 1) -> EngineSession:
    session = EngineSession(session_id=session_id, epoch=epoch, owner=owner)
    table.add(session)
    return session


def test_a_stream_belongs_to_the_owner_that_attached_on_it() -> None:
    table, owner = table_with()
    other, _ = table.attach(2, "b", 0)
    assert table.owner_of(1) is owner
    assert table.owner_of(2) is other
    assert table.owner_of(3) is None


@pytest.mark.parametrize("lease", [5, 6])
def test_a_newer_stream_cuts_off_the_older_one_and_inherits_its_sessions(lease: int) -> None:
    table, owner = table_with()
    session = add(table, owner, "s")
    again, former = table.attach(2, "a", lease)
    assert (again, former) == (owner, 1)
    assert owner.lease_generation == lease
    assert table.owner_of(1) is None
    assert table.of(owner) == [session]


def test_a_lower_lease_is_refused_and_changes_nothing() -> None:
    table, owner = table_with()
    with pytest.raises(StaleLease):
        table.attach(2, "a", 4)
    assert owner.stream_id == 1
    assert table.owner_of(1) is owner
    assert table.owner_of(2) is None


def test_a_broken_stream_orphans_its_own_sessions_only() -> None:
    table, owner = table_with()
    other, _ = table.attach(2, "b", 0)
    mine, theirs = add(table, owner, "s"), add(table, other, "t")
    assert table.detach(1, 100.0) == [mine]
    assert mine.orphaned_at_s == 100.0
    assert theirs.orphaned_at_s is None
    assert owner.stream_id is None


def test_the_end_of_a_stream_that_was_cut_off_orphans_nobody() -> None:
    table, owner = table_with()
    session = add(table, owner, "s")
    table.attach(2, "a", 5)
    assert table.detach(1, 100.0) == []
    assert session.orphaned_at_s is None
    assert owner.stream_id == 2


def test_attaching_again_in_time_saves_the_orphans() -> None:
    table, owner = table_with()
    session = add(table, owner, "s")
    table.detach(1, 100.0)
    table.attach(2, "a", 5)
    assert session.orphaned_at_s is None
    assert table.expired(1e9) == []
    assert table.next_expiry_s() is None


def test_orphans_expire_after_their_time_to_live() -> None:
    table, owner = table_with()
    other, _ = table.attach(2, "b", 0)
    first, second = add(table, owner, "s"), add(table, other, "t")
    table.detach(1, 100.0)
    table.detach(2, 130.0)
    assert table.next_expiry_s() == 160.0
    assert table.expired(159.9) == []
    assert table.expired(160.0) == [first]
    assert table.expired(190.0) == [first, second]


def test_removing_a_session_that_was_replaced_keeps_its_successor() -> None:
    table, owner = table_with()
    old = add(table, owner, "s", epoch=1)
    new = add(table, owner, "s", epoch=2)
    table.remove(old)
    assert table.get("s") is new
    assert table.of(owner) == [new]
    assert len(table) == 1


def test_a_lease_is_remembered_while_sessions_or_a_stream_remain() -> None:
    table, owner = table_with(lease=5)
    session = add(table, owner, "s")
    table.detach(1, 0.0)
    with pytest.raises(StaleLease):
        table.attach(2, "a", 4)
    table.remove(session)
    assert table.attach(2, "a", 4)[0] is not owner
