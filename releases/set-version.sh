#!/usr/bin/env bash
# Raises the version: releases/set-version.sh 0.3.0
# It is decided in specdec/__init__.py; chart, Compose and images follow, and a test holds all of them together.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

new="${1:?which version?}"
[[ $new =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || { echo "$new is not of the form 1.2.3" >&2; exit 1; }
old="$(sed -nE 's/^__version__ = "(.*)"$/\1/p' specdec/__init__.py)"
escaped="${old//./\\.}"
sed -i -E "s/^(__version__ = \")$escaped\"/\1$new\"/" specdec/__init__.py
sed -i -E "s/^(version: |appVersion: \")$escaped/\1$new/" helm/specdec/Chart.yaml
sed -i -E "s/^(valuesVersion: )$escaped\$/\1$new/" helm/specdec/values.yaml helm/specdec/files/added-values.yaml
sed -i -E "s/^(ARG VERSION=)$escaped\$/\1$new/" deploy/Dockerfile
sed -i -E "s/(image: \\$\{[A-Z_]+:-specdec-[a-z-]+:)$escaped\}/\1$new}/" deploy/compose.yaml deploy/compose.gpu.yaml
sed -i -E \
    -e "s/^( *(app.kubernetes.io\/version|helm.sh\/chart): \"(specdec-)?)$escaped\"/\1$new\"/" \
    -e "s/^( *(- )?image: \"?specdec-[a-z-]+:)$escaped(\"?)\$/\1$new\3/" \
    tests/chart/golden/*.yaml
