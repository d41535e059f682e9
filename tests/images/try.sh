#!/usr/bin/env bash
# Tries the images as an orchestrator runs them, prints their sizes, and then Compose from end to end.
set -euo pipefail
cd /work
version="$(sed -nE 's/^__version__ = "(.*)"$/\1/p' specdec/__init__.py)"
hardened=(--read-only --tmpfs /tmp:mode=1777 --cap-drop ALL --security-opt no-new-privileges --user 31337:0 --network none)
num_passed=0
num_failed=0

check() {  # check NAME COMMAND...
    local name="$1" started="$SECONDS"
    shift
    if "$@" > /tmp/said 2>&1; then
        num_passed=$((num_passed + 1))
        echo "passed  $name ($((SECONDS - started)) s)"
    else
        num_failed=$((num_failed + 1))
        echo "FAILED  $name ($((SECONDS - started)) s)"
        tail -n 15 /tmp/said
    fi
}

until_answers() {  # until_answers CONTAINER SECONDS ANSWER: until its health check says so
    for _ in $(seq "$2"); do
        [[ $(docker inspect --format '{{.State.Status}}' "$1") == running ]] || break
        [[ $(docker exec "$1" specdec health 2>&1) == *"$3" ]] && return 0
        sleep 1
    done
    docker logs --tail 15 "$1"
    return 1
}

drains() {  # drains CONTAINER: SIGTERM ends it with 0
    docker stop --time 60 "$1" > /dev/null
    [[ $(docker logs "$1" 2>&1) == *draining* ]] || { echo "it did not say that it drains"; docker logs --tail 5 "$1"; return 1; }
    [[ $(docker inspect --format '{{.State.ExitCode}}' "$1") == 0 ]]
}

# The least processor time of ten runs of a command, in milliseconds.
# shellcheck disable=SC2016
cpu_ms='import resource, subprocess, sys
def spent():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
times = []
for _ in range(10):
    before = spent()
    subprocess.run(sys.argv[2:], check=True, stdout=subprocess.DEVNULL)
    times.append(1000 * (spent() - before))
print(f"measured {sys.argv[2:]}: {min(times):.0f} ms of CPU, at most {sys.argv[1]}")
sys.exit(min(times) > float(sys.argv[1]))'

costs_at_most() {  # costs_at_most MS DOCKER-COMMAND... -- COMMAND...
    local most="$1" docker=()
    shift
    while [[ $1 != -- ]]; do docker+=("$1"); shift; done
    shift
    "${docker[@]}" python3 -c "$cpu_ms" "$most" "$@" | tee -a /tmp/measured
}

lists_what_it_has='import json, re, sys
from importlib import metadata
bill = json.load(open("/opt/specdec/share/specdec/sbom.cdx.json"))
key = lambda name: re.sub(r"[-_.]+", "-", name).lower()
listed = {(key(part["name"]), part["version"]) for part in bill["components"]}
there = {(key(one.name), one.version) for one in metadata.distributions() if "/opt/specdec/" in str(one.locate_file(""))}
sys.exit(f"{listed ^ there}" if {name for name, _ in listed ^ there} != {"specdec"} else 0)'

for target in coordinator gateway engine-cpu; do
    image="specdec-$target:$version"
    role=(); [[ $target != engine-cpu ]] || role=(target)
    run=(docker run --rm "${hardened[@]}")
    check "$target --help" "${run[@]}" "$image" "${role[@]}" --help
    check "$target, specdec --help" costs_at_most 150 "${run[@]}" --entrypoint "" "$image" -- specdec --help
    check "$target, the commands' help" "${run[@]}" --entrypoint sh "$image" -euc \
        'for command in generate bench models drafters debug health; do specdec $command --help | grep -q "sage: specdec $command"; done'
    check "$target runs as 10001" test "$(docker inspect --format '{{.Config.User}}' "$image")" = 10001:10001
    check "$target's bill of materials lists what it has" "${run[@]}" --entrypoint python3 "$image" -c "$lists_what_it_has"
    [[ $target == engine-cpu ]] || check "$target has no pip" "${run[@]}" --entrypoint sh "$image" -c '! command -v pip && ! python3 -m pip'
done
check "client in the coordinator's image" docker run --rm "${hardened[@]}" --entrypoint python3 "specdec-coordinator:$version" \
    -c 'import specdec.client'

cache=(--tmpfs /var/cache/specdec:mode=1777,exec --volume /work/models:/models:ro)
docker run --detach --name target "${hardened[@]}" "${cache[@]}" "specdec-engine-cpu:$version" target --model=/models/target --num-threads=1 > /dev/null
docker run --detach --name draft "${hardened[@]}" "${cache[@]}" "specdec-engine-cpu:$version" draft --model=/models/draft --num-threads=1 > /dev/null
docker run --detach --name coordinator "${hardened[@]}" "specdec-coordinator:$version" --targets=127.0.0.1:1 --drafts=127.0.0.1:2 > /dev/null
docker run --detach --name gateway "${hardened[@]}" "specdec-gateway:$version" --coordinators=127.0.0.1:1 > /dev/null
check "a target starts as a foreign user" until_answers target 240 ': SERVING'
check "a draft starts as a foreign user" until_answers draft 240 ': SERVING'
check "a coordinator alone says that it does not serve" until_answers coordinator 60 NOT_SERVING
check "a gateway alone says that it does not serve" until_answers gateway 60 'NOT_SERVING (503)'
for name in target draft coordinator gateway; do
    check "SIGTERM drains a $name" drains "$name"
done
docker rm --force target draft coordinator gateway > /dev/null

megabytes() {
    awk -v bytes="$1" 'BEGIN { printf "%.1f", bytes / 1e6 }'
}

echo
base_bytes="$(docker inspect --format '{{.Size}}' python:3.11-slim-bookworm)"
echo "base: $(megabytes "$base_bytes") MB"
for target in coordinator gateway engine-cpu; do
    image="specdec-$target:$version"
    bytes="$(docker inspect --format '{{.Size}}' "$image")"
    echo "$target: $(megabytes "$bytes") MB, $(megabytes $((bytes - base_bytes))) MB above its base; layers above 0.1 MB:"
    docker history --no-trunc --human=false --format '{{.Size}} {{.CreatedBy}}' "$image" |
        awk '$1 > 1e5 { size = $1; $1 = ""; printf "  %7.1f %s\n", size / 1e6, substr($0, 1, 110) }'
done
check "the coordinator's image is at most 300 MB" test "$(docker inspect --format '{{.Size}}' "specdec-coordinator:$version")" -lt 300000000
echo

# shellcheck source=tests/images/compose.sh
source tests/images/compose.sh
cat /tmp/measured
echo "$num_passed passed, $num_failed failed"
[[ $num_failed == 0 ]]
