#!/usr/bin/env bash
# Makes an environment with a client of tests/clients/NAME.txt in .tools/clients/NAME: install.sh NAME
# It sees the packages of .venv behind its own, so that it needs no second PyTorch; "alone" on the first line of the file: it does not.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
wanted="tests/clients/$1.txt" folder=".tools/clients/$1"
rm -rf "$folder"
.venv/bin/python -m venv "$folder"
if ! head -1 "$wanted" | grep -q alone; then
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    .venv/bin/python -c "$packages" >"$("$folder/bin/python" -c "$packages")/shared.pth"
fi
echo "Installing $1 for tests"
"$folder/bin/pip" install --quiet --disable-pip-version-check --requirement "$wanted"
touch "$folder/.installed"
