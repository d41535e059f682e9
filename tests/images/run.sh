#!/usr/bin/env bash
# Builds the images of deploy/Dockerfile but the CUDA one in a Docker of its own, and tries them: tests/images/run.sh [FOLDER]
# It needs root on Debian, 8 GB of disk in FOLDER (default .tools/docker), and the package mirrors that this machine is set
# up with. No registry is reached: the base image is made of Debian's packages and this machine's Python. Docker runs in
# namespaces of its own, so that neither its mounts nor its networks are this machine's; FOLDER keeps it for the next run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder="$(realpath -m "${1:-.tools/docker}")"
root="$folder/root"
base="$folder/base"
mirror="${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
python="$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')"
mkdir -p "$folder"
command -v debootstrap >/dev/null || { apt-get -qq update && apt-get -qq install --yes --no-install-recommends debootstrap; }

packages=docker.io,docker-cli,docker-buildx,docker-compose,iptables,iproute2,ca-certificates,procps,curl
if [[ $(cat "$root/.complete" 2>/dev/null) != "$packages" ]]; then
    rm -rf "$root"
    debootstrap --variant=minbase --include="$packages" trixie "$root" "$mirror" > "$folder/root.log"
    echo "$packages" > "$root/.complete"
fi
# A base is used again as long as it would be made in the same way of the same Python: an older one once had pip's commands
# without pip.
key="$(cat tests/images/base.sh "$python/bin/python3.11" /etc/ssl/certs/ca-certificates.crt | sha256sum | cut -c 1-16)"
if [[ $(cat "$folder/base.key" 2>/dev/null) != "$key" ]]; then
    rm -rf "$base" "$folder/base.tar" "$folder/base.key"
    tests/images/base.sh "$base" "$mirror" "$python" > "$folder/base.log"
    tar -C "$base" -cf "$folder/base.tar" .
    echo "$key" > "$folder/base.key"
fi

# Torch's CPU wheel: from a folder that pip is told of, or else from an index.
read -ra found <<< "$(.venv/bin/pip config get global.find-links 2>/dev/null || true) ${PIP_FIND_LINKS:-}"
wheels="$(for place in "${found[@]}"; do ls "$place"/torch-*cpu*cp311* 2>/dev/null; done | head -n 1 || true)"
rm -rf "$folder/wheels" && mkdir "$folder/wheels"
[[ -z $wheels ]] || cp "$wheels" "$folder/wheels/"

rm -rf "$root/work" && mkdir "$root/work"
git archive HEAD | tar -x -C "$root/work"
cp -r "$folder/wheels" "$folder/base.tar" "$root/work/"
cp models/target/model.safetensors "$root/work/models/target/"
cp /etc/resolv.conf "$root/etc/resolv.conf"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
export BASE_KEY="$key"
export TORCH_CPU_PIP_ARGS="${TORCH_CPU_PIP_ARGS:-}"
for part in build try; do
    # Builds use this machine's network for the mirrors; what is tried has a network of its own.
    own=(); [[ $part == build ]] || own=(--net)
    unshare --mount --pid --fork --kill-child "${own[@]}" tests/images/enter.sh "$root" "/work/tests/images/$part.sh"
done
