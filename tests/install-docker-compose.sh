#!/usr/bin/env bash
# Puts docker-compose 2, which validates Compose files without an engine, in the folder $1. It is taken from the Debian
# or Ubuntu mirrors that this machine is set up with; Debian has had it since trixie. Nothing is installed in the system.
set -euo pipefail
folder="$1"
plugin=usr/libexec/docker/cli-plugins/docker-compose
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,archives/partial,sources}
. /etc/os-release
case "$ID" in
debian) suite=trixie package=docker-compose ;;
ubuntu) suite="$VERSION_CODENAME" package=docker-compose-v2 ;;
*) echo "docker-compose: no way to get it on $ID; put it in $folder" >&2; exit 1 ;;
esac
# Sources of the distribution itself, for that suite; both notations.
python3 - "$ID" "$suite" "$work/sources" <<'PYTHON'
import pathlib, re, sys
distribution, suite, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
kept = []
for path in [pathlib.Path("/etc/apt/sources.list"), *sorted(pathlib.Path("/etc/apt/sources.list.d").glob("*"))]:
    if not path.is_file():
        continue
    for text in re.split(r"\n\s*\n", path.read_text()) if path.suffix == ".sources" else path.read_text().splitlines():
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        fields = dict(line.split(":", 1) for line in lines if re.match(r"[A-Za-z-]+:", line))
        match = re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)", lines[0]) if lines else None
        for uri in fields.get("URIs", match[1] if match else "").split():
            if uri.rstrip("/").endswith(f"/{distribution}"):
                kept.append(uri)
key = f"/usr/share/keyrings/{distribution}-archive-keyring.gpg"
components = "main" if distribution == "debian" else "main universe"
lines = [f"deb [signed-by={key}] {uri} {suite} {components}" for uri in dict.fromkeys(kept)]
(folder / "this.list").write_text("\n".join(lines[:1]) + "\n")
PYTHON
apt=(apt-get -qq -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work" -o "Dir::Etc::SourceList=$work/sources/this.list"
    -o Dir::Etc::SourceParts=- -o APT::Sandbox::User=root)
"${apt[@]}" update
(cd "$work" && "${apt[@]}" download "$package")
dpkg-deb --fsys-tarfile "$work/$package"_*.deb | tar -x -C "$work" "./$plugin"
mkdir -p "$folder"
install -m 755 "$work/$plugin" "$folder/docker-compose"
