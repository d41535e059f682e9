"""The file of API keys: what it may hold, when it is read again, who it lets in, and that it tells no secrets."""

from __future__ import annotations

import hmac
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
import yaml
from typer.testing import CliRunner

from specdec.client import ClientSettings
from specdec.commands.app import app
from specdec.coordinator.tenants.api_keys import ApiKey, ApiKeys, Authenticator, KeyFileInvalid, read_key_file
from specdec.coordinator.tenants.quotas import Allowance, QuotaRate
from specdec.wire.errors import NotReady, PermissionDenied, Unauthenticated
from tests.support.services.key_files import hash_key

KEY = "specdec_first-key-of-the-tests-0123456789"
OTHER = "specdec_other-key-of-the-tests-0123456789"
NOW = datetime(2026, 5, 1, tzinfo=UTC)


def entry(key: str = KEY, id: str = "first", tenant: str = "acme", **limits: Any) -> dict[str, Any]:
    return {"id": id, "tenant": tenant, "sha256": hash_key(key), **limits}


def write(path: Path, *entries: dict[str, Any]) -> None:
    """Put the file in place at once, as a careful operator does."""
    fresh = path.with_name("fresh")
    text = json.dumps({"keys": entries}) if path.suffix == ".json" else yaml.safe_dump({"keys": list(entries)})
    fresh.write_text(text, encoding="utf-8")
    fresh.rename(path)


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def loaded(path: Path, clock: Clock | None = None, now: datetime = NOW) -> ApiKeys:
    keys = ApiKeys(path, clock=clock or Clock(), now=lambda: now)
    keys.load()
    return keys


@pytest.mark.parametrize("name", ["keys.yaml", "keys.json", "keys"])
def test_a_key_is_found_by_its_hash(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, entry(), entry(OTHER, "other", "umbrella"))
    keys = loaded(tmp_path / name)
    assert keys.authenticate(KEY).tenant == "acme"
    assert keys.authenticate(OTHER).tenant == "umbrella"
    for wrong in ("", KEY[:-1], KEY.upper(), hash_key(KEY), "ключ"):
        with pytest.raises(Unauthenticated) as caught:
            keys.authenticate(wrong)
        assert caught.value.reason == "INVALID_API_KEY"


@pytest.mark.parametrize("place", [0, 31, 32, 63])
def test_a_hash_that_differs_in_a_single_digit_is_another_keys(tmp_path: Path, place: int) -> None:
    digits = list(hash_key(KEY))
    digits[place] = "0" if digits[place] != "0" else "1"
    write(tmp_path / "keys.yaml", entry() | {"sha256": "".join(digits)})
    with pytest.raises(Unauthenticated):
        loaded(tmp_path / "keys.yaml").authenticate(KEY)


def test_a_key_is_held_against_every_entry_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "keys.yaml", entry(), entry(OTHER, "other", "umbrella"))
    keys = loaded(tmp_path / "keys.yaml")
    compared: list[str] = []

    def observed(stored: bytes, given: bytes) -> bool:
        compared.append(stored.hex())
        return compare(stored, given)

    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", observed)
    assert keys.authenticate(KEY).id == "first"
    assert compared == [hash_key(KEY), hash_key(OTHER)]


def test_a_key_is_good_until_it_expires(tmp_path: Path) -> None:
    write(tmp_path / "keys.yaml", entry(expires_at=NOW))
    assert loaded(tmp_path / "keys.yaml", now=NOW - timedelta(seconds=1)).authenticate(KEY).id == "first"
    with pytest.raises(Unauthenticated) as caught:
        loaded(tmp_path / "keys.yaml").authenticate(KEY)
    assert caught.value.reason == "API_KEY_EXPIRED"


def test_nobody_is_let_in_before_the_file_was_read(tmp_path: Path) -> None:
    write(tmp_path / "keys.yaml", entry())
    with pytest.raises(NotReady):
        ApiKeys(tmp_path / "keys.yaml").authenticate(KEY)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"keys": [{"id": "first", "tenant": "acme"}]}, "keys.0.sha256"),
        ({"keys": [entry() | {"sha256": KEY}]}, "keys.0.sha256"),
        ({"keys": [entry() | {"key": KEY}]}, "keys.0.(unknown name)"),
        ({"keys": [entry() | {KEY: 1}]}, "keys.0.(unknown name)"),
        ({"keys": [entry(max_tokens=0)]}, "keys.0.max_tokens"),
        ({"keys": [entry(tokens_per_s=0)]}, "keys.0.tokens_per_s"),
        ({"keys": [entry(burst_tokens=5)]}, "burst_tokens needs tokens_per_s"),
        ({"keys": [entry(expires_at="2026-01-01T00:00:00")]}, "keys.0.expires_at"),
        ({"keys": [entry(tenant="")]}, "keys.0.tenant"),
        ({"keys": [entry(), entry(OTHER)]}, "two keys have the id first"),
        ({"keys": [entry(), entry(id="second")]}, "first and second are the same key"),
        ({"keys": [entry(), entry(OTHER, "second", tokens_per_s=3)]}, "differ in tokens_per_s"),
        ([], "dictionary"),
        (None, "dictionary"),
    ],
)
def test_a_file_that_is_wrong_is_refused_without_quoting_it(tmp_path: Path, content: Any, says: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(KeyFileInvalid) as caught:
        read_key_file(path)
    assert says in str(caught.value)
    assert KEY not in str(caught.value)
    assert hash_key(KEY) not in str(caught.value)


@pytest.mark.parametrize("text", [f"keys: [{KEY}", f"keys:\n  - {{id: a\n{KEY}: }}}}", f"*{KEY}", "\x00", "\udcff"])
def test_a_file_that_does_not_parse_is_refused_without_quoting_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(KeyFileInvalid) as caught:
        read_key_file(path)
    assert "does not parse" in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_new_file_holds_after_a_second_without_a_restart(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.yaml", Clock()
    write(path, entry())
    keys = loaded(path, clock)
    write(path, entry(), entry(OTHER, "second"))
    with pytest.raises(Unauthenticated):
        keys.authenticate(OTHER)
    clock.now_s += 1.0
    assert keys.authenticate(OTHER).tenant == keys.authenticate(KEY).tenant == "acme"
    write(path, entry(OTHER, "second"))
    clock.now_s += 1.0
    with pytest.raises(Unauthenticated):
        keys.authenticate(KEY)


def test_a_secret_that_kubernetes_swaps_by_a_link_is_read_again(tmp_path: Path) -> None:
    for folder, content in (("v1", entry()), ("v2", entry(OTHER, "second"))):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "keys.yaml", content)
    stamp = (tmp_path / "v1" / "keys.yaml").stat().st_mtime_ns
    os.utime(tmp_path / "v2" / "keys.yaml", ns=(stamp, stamp))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    clock = Clock()
    keys = loaded(tmp_path / "keys.yaml", clock)
    (tmp_path / "..data_tmp").symlink_to("v2")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    clock.now_s += 1.0
    assert keys.authenticate(OTHER).id == "second"


def test_a_broken_or_missing_new_file_is_logged_once_and_the_old_keys_stay(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.yaml", Clock()
    write(path, entry())
    keys = loaded(path, clock)
    with structlog.testing.capture_logs() as logs:
        write(path, entry() | {"sha256": OTHER})
        for _ in range(3):
            clock.now_s += 1.0
            assert keys.authenticate(KEY).id == "first"
        path.unlink()
        for _ in range(3):
            clock.now_s += 1.0
            assert keys.authenticate(KEY).id == "first"
    assert [line["event"] for line in logs] == ["api_keys_not_reloaded"] * 2
    assert OTHER not in str(logs)
    assert KEY not in str(logs)
    write(path, entry(OTHER, "second"))
    clock.now_s += 1.0
    assert keys.authenticate(OTHER).id == "second"


def test_what_a_key_leaves_out_is_as_the_deployment_says() -> None:
    default = Allowance(max_prompt_tokens=100, max_concurrent_requests=3, quota=QuotaRate(5.0, 50.0))
    assert ApiKey(**entry()).allowance(default) == default
    own = ApiKey(**entry(max_prompt_tokens=7, max_tokens=8, max_concurrent_requests=9, tokens_per_s=2))
    assert own.allowance(default) == Allowance(7, 8, 9, QuotaRate(2.0, 20.0))


def test_a_caller_needs_one_bearer_key_and_is_the_tenant_of_that_key(tmp_path: Path) -> None:
    write(tmp_path / "keys.yaml", entry())
    authenticator = Authenticator(loaded(tmp_path / "keys.yaml"), Allowance())
    for claimed in (None, "acme"):
        assert authenticator.identify([f"Bearer {KEY}"], claimed) == ("acme", Allowance())
    assert authenticator.identify([f"bearer {KEY}"], None)[0] == "acme"
    for values in ([], [KEY], ["Bearer "], [f"Basic {KEY}"], [f"Bearer {KEY}", f"Bearer {KEY}"]):
        with pytest.raises(Unauthenticated) as caught:
            authenticator.identify(values, None)
        assert caught.value.reason == "NO_API_KEY"
    for claimed in ("umbrella", ""):
        with pytest.raises(PermissionDenied):
            authenticator.identify([f"Bearer {KEY}"], claimed)


def test_without_a_file_callers_are_who_they_say() -> None:
    authenticator = Authenticator(None, Allowance(max_prompt_tokens=5))
    assert authenticator.identify([], "acme") == ("acme", Allowance(max_prompt_tokens=5))
    assert authenticator.identify(["Bearer whatever"], None)[0] == ""


def test_representations_show_no_secret() -> None:
    assert hash_key(KEY) not in repr(ApiKey(**entry()))
    assert KEY not in repr(ClientSettings(api_key=KEY))


def test_the_command_makes_a_key_and_the_entry_that_accepts_it(tmp_path: Path) -> None:
    runs = [CliRunner().invoke(app, ["keys", "new", "--id", "k1", "--tenant", "acme"]) for _ in range(2)]
    made = []
    for run in runs:
        assert run.exit_code == 0, run.output
        key, _, yaml_entry = run.stdout.partition("\n")
        made.append(key)
        path = tmp_path / "keys.yaml"
        path.write_text("keys:\n" + yaml_entry, encoding="utf-8")
        assert loaded(path).authenticate(key).id == "k1"
        hashed = CliRunner().invoke(app, ["keys", "hash"], input=key + "\n")
        assert hashed.stdout.strip() == hash_key(key)
    assert made[0] != made[1]


@pytest.mark.parametrize(
    "arguments", [["new", "--id", "a b", "--tenant", "t"], ["new", "--id", "a", "--tenant", ""], ["hash"]]
)
def test_the_command_refuses_what_the_file_could_not_hold_and_weak_keys(arguments: list[str]) -> None:
    run = CliRunner().invoke(app, ["keys", *arguments], input="password\n")
    assert run.exit_code == 2
