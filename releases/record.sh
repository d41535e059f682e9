#!/usr/bin/env bash
# Records a release, from its commit: releases/record.sh [COMMIT]
# The next version is held against what this leaves in releases/VERSION, in place of the release before: the protos as an
# image, the wheel, without kernels so that it fits every machine, and the chart without its dashboards. A commit gives the
# same bytes each time, as long as setuptools, protoc and zlib are the same; record.json has the versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022

python="${PYTHON:-.venv/bin/python}"
python="$(cd "$(dirname "$python")" && pwd)/$(basename "$python")"
commit="$(git rev-parse --verify "${1:-HEAD}^{commit}")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work/source" "$work/release"
git archive "$commit" pyproject.toml setup.py README.md LICENSE proto specdec coordinator draft_service target_service \
    $(git ls-tree --name-only "$commit" gateway) |
    tar --extract --directory "$work/source"
version="$(sed -nE 's/^__version__ = "(.*)"$/\1/p' "$work/source/specdec/__init__.py")"
git archive "$commit" helm/specdec/{Chart.yaml,values.yaml,values.schema.json,templates} |
    tar --extract --directory "$work/release" --transform 's,^helm/specdec,chart,'
grep -q "^## \[$version\]" CHANGELOG.md || { echo "CHANGELOG.md has no section [$version]" >&2; exit 1; }

(
    cd "$work/source"
    SPECDEC_PURE_WHEEL=1 SOURCE_DATE_EPOCH="$(git -C "$OLDPWD" show --no-patch --format=%ct "$commit")" \
        "$python" -c 'import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])' "$work/release" \
        >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
    include="$("$python" -c 'import pathlib, google.rpc; print(pathlib.Path(list(google.rpc.__path__)[0]).parents[1])')"
    "$python" -m grpc_tools.protoc -Iproto -I"$include" --include_imports -o "$work/release/protos.binpb" \
        proto/specdec/v1/*.proto
)
"$python" - "$work/release" "$version" "$commit" <<'PYTHON'
import hashlib
import json
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path

folder = Path(sys.argv[1])
files = sorted(path for path in folder.rglob("*") if path.is_file())
digests = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
tools = {"python": platform.python_version(), **{name: version(name) for name in ("setuptools", "grpcio-tools")}}
section = re.search(rf"(?ms)^## \[{re.escape(sys.argv[2])}\].*?(?=^## |\Z)", Path("CHANGELOG.md").read_text())
digests["CHANGELOG.md"] = hashlib.sha256(section[0].strip().encode()).hexdigest()
record = {"version": sys.argv[2], "commit": sys.argv[3], "tools": tools, "sha256": digests}
(folder / "record.json").write_text(json.dumps(record, indent=2) + "\n")
PYTHON
rm -rf releases/[0-9]*/
mv "$work/release" "releases/$version"
ls -l "releases/$version"
