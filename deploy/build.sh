#!/usr/bin/env bash
# Builds images with docker or buildah: deploy/build.sh [coordinator|gateway|engine-cpu|engine-cuda ...]
# Without a name it builds all, and prints the digest of each. BUILDER is the build command (default: docker build), TAG the tag (default: specdec's
# version). With ATTEST=1 BuildKit adds a bill of materials and provenance to each image, which a registry keeps
# (BUILDER="docker buildx build --push"); SBOM_SCANNER names another image than BuildKit's scanner. Variables named as the Dockerfile's arguments set these.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version="$(sed -nE 's/^__version__ = "(.*)"$/\1/p' specdec/__init__.py)"
revision="$(git rev-parse --verify --quiet HEAD 2>/dev/null || echo unknown)"
read -ra builder <<< "${BUILDER:-docker build}"
arguments=()
for name in PYTHON_IMAGE TORCH_CPU_PIP_ARGS TORCH_CPU TORCH_CUDA_PIP_ARGS TORCH_CUDA SOURCE; do
    if [[ -n ${!name:-} ]]; then
        arguments+=(--build-arg "$name=${!name}")
    fi
done
if [[ ${ATTEST:-0} != 0 ]]; then
    arguments+=(--sbom="${SBOM_SCANNER:+generator=}${SBOM_SCANNER:-true}" --provenance=mode=max)
fi
targets=("$@")
if [[ ${#targets[@]} -eq 0 ]]; then
    targets=(coordinator gateway engine-cpu engine-cuda)
fi
digests="$(mktemp -d)"
trap 'rm -rf "$digests"' EXIT
for target in "${targets[@]}"; do
    "${builder[@]}" --file deploy/Dockerfile --target "$target" --tag "specdec-$target:${TAG:-$version}" --iidfile "$digests/$target" \
        --build-arg VERSION="$version" --build-arg REVISION="$revision" \
        --build-arg CREATED="$(date --utc +%Y-%m-%dT%H:%M:%SZ)" "${arguments[@]}" .
done
for target in "${targets[@]}"; do
    printf '%s %s\n' "specdec-$target:${TAG:-$version}" "$(cat "$digests/$target")"
done
