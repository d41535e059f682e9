#!/usr/bin/env bash
# Builds the packages of this checkout: releases/packages.sh [FOLDER]
# Puts an sdist and a wheel of specdec, of its plugin for vLLM and of the pair that ships, into FOLDER (default: dist). Wheels are built of what the
# sdists hold. The same sources and tools give the same bytes; what setup.py reads of the environment counts here too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022

python="${PYTHON:-.venv/bin/python}"
python="$(cd "$(dirname "$python")" && pwd)/$(basename "$python")"
mkdir -p "${1:-dist}"
out="$(cd "${1:-dist}" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git show --no-patch --format=%ct HEAD 2>/dev/null || date +%s)}"
export SOURCE_DATE_EPOCH

build() { # KIND FOLDER OUT
    (cd "$2" && "$python" -c "import sys; from setuptools import build_meta; build_meta.build_$1(sys.argv[1])" "$3") \
        >"$work/log" 2>&1 || { cat "$work/log" >&2; return 1; }
}

package() { # FOLDER NAME...: what of it is the source
    mkdir -p "$work/source" "$work/sdist" "$work/unpacked"
    tar --create --directory "$1" --exclude=__pycache__ --exclude='*.egg-info' --exclude='*.xz' --mode='u=rwX,go=rX' "${@:2}" |
        tar --extract --directory "$work/source"
    build sdist "$work/source" "$work/sdist"
    tar --extract --file "$work"/sdist/*.tar.gz --strip-components=1 --directory "$work/unpacked"
    build wheel "$work/unpacked" "$out"
    mv "$work"/sdist/*.tar.gz "$out"
    rm -rf "$work"/{source,sdist,unpacked}
}

packages=(*/__init__.py)
package . pyproject.toml setup.py README.md LICENSE proto "${packages[@]%/__init__.py}"
package vllm_plugin pyproject.toml specdec_vllm
package models pyproject.toml setup.py README.md target draft eagle3 prompts.json
ls -l "$out"
