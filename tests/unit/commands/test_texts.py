"""Text for the `specdec` command that is not UTF-8, or begins with a byte order mark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from specdec.commands.app import app
from specdec.commands.health import probe
from specdec.commands.inputs.config_file import read_config
from specdec.commands.measuring.prompts import PromptsInvalid, read_prompts
from specdec.config.sources import SettingsInvalid, load_settings
from specdec.coordinator.tenants.api_keys import read_key_file
from specdec.gateway.settings import GatewaySettings
from specdec.service.texts import NotText, decoded, fault_of
from tests.support.for_each import for_each
from tests.support.services.fake_coordinator import FakeCoordinator, running_fake_coordinator

BYTE = "\udcff"
"""How Python hands over the byte 0xff of an argument or a variable."""
MARK = b"\xef\xbb\xbf"
NO_TEXT = "is not UTF-8 text: byte 0xff at position"
SECRET = b"an api key of more than 32 characters"


@pytest.fixture
def coordinator() -> Iterator[tuple[FakeCoordinator, str]]:
    with running_fake_coordinator() as running:
        yield running


def invoke(*arguments: str, stdin: bytes = b"", **variables: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "200", **variables})
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.stdout, done.stderr.strip().rpartition("\n")[2]


@for_each(
    "case",
    [
        (["generate", f"a{BYTE}"], {}, "prompt"),
        (["generate", "--message", f"user:{BYTE}"], {}, "--message"),
        (["generate", "x", "--stop", f"é{BYTE}"], {}, "--stop"),
        (["generate", "x", "--choice", "a", "--choice", BYTE], {}, "--choice"),
        (["generate", "x", "--model", BYTE], {}, "--model"),
        (["generate", "x"], {"SPECDEC_GENERATE_REGEX": BYTE}, "--regex"),
        (["generate", "x", "--address", f"h{BYTE}:1"], {}, "--address"),
        (["models"], {"SPECDEC_ADDRESS": f"h{BYTE}:1"}, "--address"),
        (["keys", "new", "--id", BYTE, "--tenant", "a"], {}, "--id"),
        (["up", "--target", BYTE], {}, "--target"),
    ],
)
def test_values_that_are_no_text_are_refused_in_a_line_that_names_the_flag(
    case: tuple[list[str], dict[str, str], str],
) -> None:
    arguments, variables, flag = case
    code, printed, message = invoke(*arguments, **variables)
    assert (code, printed) == (2, "")
    assert flag in message
    assert NO_TEXT in message


@for_each("key", [BYTE, "line\n", "é", "\ufeffkey"])
def test_keys_that_no_header_carries_are_refused(key: str) -> None:
    code, _, message = invoke("models", SPECDEC_API_KEY=key)
    assert code == 2
    assert message.endswith("the key in SPECDEC_API_KEY has characters that no HTTP header carries")


def test_other_flags_and_files_that_are_no_text_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--address", "--service"):
        with pytest.raises(SystemExit):
            probe([flag, f"{BYTE}:1"])
        assert f"argument {flag}: " in (told := capsys.readouterr().err)
        assert NO_TEXT in told
    with pytest.raises(SettingsInvalid, match=r"coordinators is not UTF-8 text: .*SPECDEC_GATEWAY_COORDINATORS"):
        load_settings(GatewaySettings, ["--coordinators", f"{BYTE}:1"], env_prefix="SPECDEC_GATEWAY_", prog="x")
    bad = tmp_path / "bad.txt"
    for content, why in ((b"ab\xff", f"bad.txt {NO_TEXT} 2"), ("é".encode("utf-16"), "bad.txt is UTF-16: convert")):
        bad.write_bytes(content)
        for flag in ("--prompt-file", "--json-schema-file", "--grammar-file", "--prediction-file"):
            code, _, message = invoke("generate", *([] if flag == "--prompt-file" else ["x"]), flag, str(bad))
            assert (code, flag in message, why in message) == (2, True, True)
        with pytest.raises(PromptsInvalid, match=why):
            read_prompts(bad)
        with pytest.raises(typer.BadParameter, match=why.removeprefix("bad.txt ")):
            read_config(bad)
        code, _, message = invoke("generate", stdin=content)
        assert (code, "standard input" in message) == (2, True)
        assert why.removeprefix("bad.txt ") in message
        assert invoke("keys", "hash", stdin=content)[0] == 2


def test_a_file_name_may_have_any_bytes(coordinator: tuple[FakeCoordinator, str], tmp_path: Path) -> None:
    servicer, address = coordinator
    file = tmp_path / f"prompt{BYTE}"
    file.write_text("from a file")
    assert invoke("generate", "--prompt-file", str(file), "--address", address)[0] == 0
    assert servicer.requests[-1].prompt == "from a file"


def test_byte_order_marks_of_files_and_standard_input_are_no_text(
    coordinator: tuple[FakeCoordinator, str], tmp_path: Path
) -> None:
    servicer, address = coordinator
    file = tmp_path / "prompt.txt"
    file.write_bytes(MARK + "é\r\n\ufeff".encode())
    assert invoke("generate", "--prompt-file", str(file), "--address", address)[0] == 0
    assert invoke("generate", "--address", address, stdin=file.read_bytes())[0] == 0
    assert invoke("generate", "\ufeffx", "--address", address)[0] == 0
    assert [request.prompt for request in servicer.requests] == ["é\n\ufeff", "é\n\ufeff", "\ufeffx"]
    assert (
        invoke("keys", "hash", stdin=MARK + SECRET.replace(b" ", b"-"))[1]
        == invoke("keys", "hash", stdin=SECRET.replace(b" ", b"-"))[1]
    )


def test_byte_order_marks_of_settings_are_ignored(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_bytes(MARK + b"[up]\nhost = 'h'\n")
    assert read_config(config) == {"up": {"host": "h"}}
    settings = tmp_path / "settings.json"
    settings.write_bytes(MARK + json.dumps({"coordinators": ["h:1"]}).encode())
    loaded = load_settings(GatewaySettings, ["--config", str(settings)], env_prefix="SPECDEC_GATEWAY_", prog="x")
    assert loaded.coordinators == ("h:1",)
    keys = tmp_path / "keys.json"
    keys.write_bytes(MARK + json.dumps({"keys": [{"id": "k", "tenant": "t", "sha256": "0" * 64}]}).encode())
    assert [key.id for key in read_key_file(keys)] == ["k"]


@for_each("data", [b"\xff\xfea\0", b"\xfe\xff\0a", b"\xff\xfe\0\0a\0\0\0", b"\0\0\xfe\xff\0\0\0a"])
def test_other_encodings_are_named(data: bytes) -> None:
    with pytest.raises(NotText, match=r"is UTF-(16|32): convert it to UTF-8 \(iconv"):
        decoded(data)


@for_each(
    "case",
    [
        ("é\ufeff\0", None),
        (["a", {"b": BYTE}], f"{NO_TEXT} 0"),
        ({"é" + BYTE: 1}, f"{NO_TEXT} 2"),
        (("a\ud800",), "has half of a surrogate pair at character 1"),
        (Path(BYTE), None),
        (b"\xff", None),
    ],
)
def test_faults_are_found_in_lists_and_mappings(case: tuple[object, str | None]) -> None:
    value, fault = case
    assert fault_of(value) == fault
