"""The last release: recorded whole, told apart from this version, and not broken by its protos."""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml
from google.protobuf import descriptor_pb2
from packaging.version import Version

import specdec
from tests.support.releases import ROOT, last_release

BASELINE = last_release()
MOST_WHEEL_BYTES = 2_000_000
BUF_FAILED = 100
"""What buf ends with when it found something; make says 2."""


def test_what_was_recorded_is_unchanged() -> None:
    found = {path for path in BASELINE.folder.rglob("*") if path.is_file()}
    files = {str(path.relative_to(BASELINE.folder)) for path in found} - {"record.json"}
    assert files == BASELINE.sha256.keys() - {"CHANGELOG.md"}
    assert {name: BASELINE.digest_of(name) for name in files} == {name: BASELINE.sha256[name] for name in files}


def test_the_changelog_says_of_the_release_what_it_said_then() -> None:
    """What comes later, or is merged late, belongs under [Unreleased]."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"(?ms)^## \[{re.escape(BASELINE.version)}\].*?(?=^## |\Z)", text)
    assert section is not None
    assert hashlib.sha256(section[0].strip().encode()).hexdigest() == BASELINE.sha256["CHANGELOG.md"]
    assert text.index("## [Unreleased]") < section.start()


def test_the_wheel_is_of_its_version_fits_every_machine_and_is_small() -> None:
    assert BASELINE.wheel.stat().st_size < MOST_WHEEL_BYTES
    with zipfile.ZipFile(BASELINE.wheel) as archive:
        names = archive.namelist()
        assert f'__version__ = "{BASELINE.version}"' in archive.read("specdec/__init__.py").decode()
    assert not [name for name in names if name.endswith(".so")]
    assert "specdec/engine/native/kernels.cpp" in names


def test_the_image_has_the_protos_of_the_wheel() -> None:
    image = descriptor_pb2.FileDescriptorSet.FromString(BASELINE.protos.read_bytes())
    ours = [file for file in image.file if file.name.startswith("specdec/")]
    for message in (message for file in ours for message in file.message_type):
        _drop_json_names(message)
    assert len(ours) == 5
    with zipfile.ZipFile(BASELINE.wheel) as archive:
        for file in ours:
            stub = archive.read(file.name.replace(".proto", "_pb2.py")).decode()
            (encoded,) = re.findall(r"(?m)AddSerializedFile\((b'.*')\)$", stub)
            assert descriptor_pb2.FileDescriptorProto.FromString(ast.literal_eval(encoded)) == file, file.name


def _drop_json_names(message: descriptor_pb2.DescriptorProto) -> None:
    """protoc writes them down in an image only."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _drop_json_names(nested)


def test_this_version_is_later_than_the_last_release() -> None:
    assert Version(specdec.__version__) > Version(BASELINE.version)


def test_one_version_stands_everywhere() -> None:
    chart = yaml.safe_load((ROOT / "helm/specdec/Chart.yaml").read_text(encoding="utf-8"))
    found = {"chart": {chart["version"], chart["appVersion"]}}
    deploy = ROOT / "deploy"
    for name in ("values.yaml", "files/added-values.yaml"):
        values = yaml.safe_load((ROOT / "helm/specdec" / name).read_text(encoding="utf-8"))
        found[name] = {values["valuesVersion"]}
    found["dockerfile"] = set(
        re.findall(r"(?m)^ARG VERSION=(.*)$", (deploy / "Dockerfile").read_text(encoding="utf-8"))
    )
    for name in ("compose.yaml", "compose.gpu.yaml"):
        text = (deploy / name).read_text(encoding="utf-8")
        found[name] = set(re.findall(r"(?m)^ *image: \S*specdec-[a-z-]+:([^}\s]+)", text))
    for page in sorted((ROOT / "tests/chart/golden").glob("*.yaml")):
        text = page.read_text(encoding="utf-8")
        found[page.name] = set(re.findall(r'(?m)^ *app.kubernetes.io/version: "(.*)"$', text))
        found[page.name] |= set(re.findall(r'(?m)^ *helm.sh/chart: "specdec-(.*)"$', text))
    assert found == {name: {specdec.__version__} for name in found}


def copied_to(folder: Path, *names: str) -> Path:
    """A part of this checkout, to change."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def test_raising_the_version_raises_it_in_all_places(tmp_path: Path) -> None:
    places = [path.relative_to(ROOT) for path in (ROOT / "tests/chart/golden").glob("*.yaml")]
    places = [*map(str, places), *(f"deploy/{name}" for name in ("Dockerfile", "compose.yaml", "compose.gpu.yaml"))]
    script = "releases/set-version.sh"
    values = [f"helm/specdec/{name}" for name in ("values.yaml", "files/added-values.yaml")]
    folder = copied_to(tmp_path, *places, *values, "specdec/__init__.py", "helm/specdec/Chart.yaml", script)
    old = re.compile(rf"(?<![\d.]){re.escape(specdec.__version__)}(?![\d.])")
    counts = {path: len(old.findall((folder / path).read_text())) for path in [*places, *values, "specdec/__init__.py"]}
    subprocess.run(["bash", folder / script, "17.4.9"], check=True)
    for path, count in counts.items():
        assert (folder / path).read_text().count("17.4.9") == count > 0, path
        assert not old.findall((folder / path).read_text()), path
    refused = subprocess.run(["bash", folder / script, "0.3.0-rc1"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "not of the form" in refused.stderr


def lint(protos: Path) -> subprocess.CompletedProcess[str]:
    """What `make lint-proto` says of other protos."""
    command = ["make", "--no-print-directory", "-o", ".venv/.installed", "lint-proto", f"PROTO_ROOT={protos}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    """A copy of the protos, to change."""
    return copied_to(tmp_path, *(f"proto/specdec/v1/{path.name}" for path in ROOT.glob("proto/specdec/v1/*.proto"))) / (
        "proto"
    )


def change(protos: Path, name: str, before: str, after: str) -> None:
    path = protos / "specdec/v1" / name
    text = path.read_text()
    assert text.count(before) == 1, before
    path.write_text(text.replace(before, after))


LINK = "    // Join the session at its target. Older drafts ignore it.\n    LinkGrant link = 6;\n"
BREAKING = [
    (
        *("target.proto", "repeated TargetEntry entries = 2;", "repeated TargetEntry entries = 7;"),
        'Previously present field "2" with name "entries" on message "VerifyRequest" was deleted.',
    ),
    (
        *("common.proto", "string traceparent = 14;", "repeated string traceparent = 14;"),
        'Field "14" with name "traceparent" on message "OpenSession" changed cardinality from "optional with implicit '
        'presence" to "repeated".',
    ),
    (
        *("common.proto", "bytes cache_salt = 10;", 'bytes prefix_salt = 10 [json_name = "cacheSalt"];'),
        'Field "10" on message "OpenSession" changed name from "cache_salt" to "prefix_salt".',
    ),
    (
        *("common.proto", "uint32 num_prompt_tokens = 2;", "string num_prompt_tokens = 2;"),
        'Field "2" with name "num_prompt_tokens" on message "OpenSession" changed type from "uint32" to "string".',
    ),
    (
        *("common.proto", "uint64 lease_generation = 8;", "uint32 lease_generation = 8;"),
        'Field "8" with name "lease_generation" on message "OpenSession" changed type from "uint64" to "uint32".',
    ),
    (
        *("common.proto", "optional uint32 deadline_ms = 7;", "uint32 deadline_ms = 7;"),
        'Field "7" with name "deadline_ms" on message "OpenSession" changed cardinality from "optional with explicit '
        'presence" to "optional with implicit presence".',
    ),
    (
        *("common.proto", "  // Lower values run first.\n  int32 priority = 9;\n", "  reserved 9;\n"),
        'Previously present field "9" with name "priority" on message "OpenSession" was deleted.',
    ),
    (
        *("draft.proto", f"    // End the session.\n    CloseSession close = 5;\n{LINK}  }}\n"),
        f"{LINK}  }}\n  // End the session.\n  CloseSession close = 5;\n",
        'Field "5" with name "close" on message "DraftEntry" moved from inside to outside a oneof.',
    ),
    (
        *("common.proto", "  // A plain decoding step: no usable proposal.\n  ORIGIN_DECODE = 5;\n", ""),
        'Previously present enum value "5" on enum "Origin" was deleted.',
    ),
    (
        *(
            "coordinator.proto",
            "  // Token ids to text.\n  rpc Detokenize(DetokenizeRequest) returns (DetokenizeResponse);",
        ),
        *("", 'Previously present RPC "Detokenize" on service "CoordinatorService" was deleted.'),
    ),
    (
        *("coordinator.proto", "rpc Abort(AbortRequest) returns (AbortResponse);"),
        "rpc Abort(AbortRequest) returns (stream AbortResponse);",
        'RPC "Abort" on service "CoordinatorService" changed from server unary to server streaming.',
    ),
]
ADDITIONS = [
    (
        *("common.proto", "  // Lower values run first.\n"),
        "  // New.\n  optional uint32 brand_new = 900;\n  // Lower values run first.\n",
    ),
    (
        *("target.proto", "    // More credit.\n    Credit credit = 5;\n"),
        "    // New.\n    Credit brand_new = 900;\n    // More credit.\n    Credit credit = 5;\n",
    ),
    (
        *("coordinator.proto", "  // Token ids to text.\n"),
        "  // New.\n  rpc BrandNew(BrandNewRequest) returns (BrandNewResponse);\n  // Token ids to text.\n",
    ),
    (
        *("common.proto", "  ORIGIN_DECODE = 5;\n"),
        "  ORIGIN_DECODE = 5;\n  // New.\n  ORIGIN_BRAND_NEW = 900;\n",
    ),
]
NEW_MESSAGES = "\n// New.\nmessage BrandNewRequest {}\n\n// New.\nmessage BrandNewResponse {}\n"


def test_every_change_of_a_proto_that_the_last_release_would_not_understand_is_refused(protos: Path) -> None:
    for name, old, new, _ in BREAKING:
        change(protos, name, old, new)
    done = lint(protos)
    assert done.returncode == 2, done.stdout + done.stderr
    said = [re.sub(r"^specdec/v1/(\S+\.proto):\d+:\d+:", r"\1: ", line) for line in done.stdout.splitlines()]
    assert sorted(said) == sorted(f"{name}: {message}" for name, _, _, message in BREAKING)


def test_one_breaking_change_is_enough(protos: Path) -> None:
    change(protos, *BREAKING[0][:3])
    done = lint(protos)
    assert done.returncode == 2
    assert f"Error {BUF_FAILED}" in done.stderr


def test_protos_may_grow(protos: Path) -> None:
    for addition in ADDITIONS:
        change(protos, *addition)
    path = protos / "specdec/v1/coordinator.proto"
    path.write_text(path.read_text() + NEW_MESSAGES)
    done = lint(protos)
    assert done.returncode == 0, done.stdout + done.stderr
