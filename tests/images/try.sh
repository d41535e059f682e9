#!/usr/bin/env bash
# Tries the images as an orchestrator runs them, prints their sizes, and then Compose from end to end.
set -euo pipefail
cd /work
version="$(sed -nE 's/^__version__ = "(.*)"$/\1/p' specdec/__init__.py)"
hardened=(--read-only --tmpfs /tmp:mode=1777 --cap-drop ALL --security-opt no-new-privileges --user 31337:0 --network none)
num_passed=0
num_failed=0

check() {  # check NAME COMMAND...
    local name="$1"
    shift
    if "$@" > /tmp/said 2>&1; then
        num_passed=$((num_passed + 1))
        echo "passed  $name"
    else
        num_failed=$((num_failed + 1))
        echo "FAILED  $name"
        tail -n 15 /tmp/said
    fi
}

until_healthy() {  # until_healthy CONTAINER SECONDS
    for _ in $(seq "$2"); do
        [[ $(docker inspect --format '{{.State.Status}}' "$1") == running ]] || break
        docker exec "$1" specdec health > /dev/null 2>&1 && return 0
        sleep 1
    done
    docker logs --tail 15 "$1"
    return 1
}

drains() {  # drains CONTAINER: SIGTERM ends it with 0
    docker stop --time 60 "$1" > /dev/null
    docker logs "$1" 2>&1 | grep -q '"draining"\|draining' || { echo "it did not say that it drains"; return 1; }
    [[ $(docker inspect --format '{{.State.ExitCode}}' "$1") == 0 ]]
}

for target in coordinator gateway engine-cpu; do
    image="specdec-$target:$version"
    check "$target --help" docker run --rm "${hardened[@]}" "$image" $([[ $target != engine-cpu ]] || echo target) --help
    check "$target, specdec --help" docker run --rm "${hardened[@]}" --entrypoint specdec "$image" --help
    check "$target runs as 10001" test "$(docker inspect --format '{{.Config.User}}' "$image")" = 10001:10001
    [[ $target == engine-cpu ]] || check "$target has no pip" docker run --rm "${hardened[@]}" --entrypoint sh "$image" -c '! command -v pip && ! python3 -m pip'
done
check "client in the coordinator's image" docker run --rm "${hardened[@]}" --entrypoint python3 "specdec-coordinator:$version" \
    -c 'import specdec.client'

docker run --detach --name target "${hardened[@]}" --tmpfs /var/cache/specdec:mode=1777,exec --volume /work/models:/models:ro \
    "specdec-engine-cpu:$version" target --model=/models/target --num-threads=1 > /dev/null
docker run --detach --name gateway "${hardened[@]}" "specdec-gateway:$version" --coordinators=127.0.0.1:1 > /dev/null
check "a target starts as a foreign user" until_healthy target 240
check "SIGTERM drains a target" drains target
check "SIGTERM drains a gateway" drains gateway
docker rm --force target gateway > /dev/null

echo
printf '%-14s %8s %s\n' image MB 'above its base'
base_bytes="$(docker inspect --format '{{.Size}}' python:3.11-slim-bookworm)"
for target in coordinator gateway engine-cpu; do
    bytes="$(docker inspect --format '{{.Size}}' "specdec-$target:$version")"
    printf '%-14s %8d %8d\n' "$target" $((bytes / 1000000)) $(((bytes - base_bytes) / 1000000))
done
echo

# Compose, without the images that only a registry has: services run without Redis.
export REDIS_PASSWORD=a-password-of-this-test GRAFANA_ADMIN_PASSWORD=another RESUME_SECRET=sixteen-characters
compose=(docker compose --project-directory deploy -f deploy/compose.yaml)
ours=(target draft coordinator gateway)

answers() {
    curl --silent --fail --max-time 60 http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \
        -d '{"prompt": "def fibonacci(n):", "max_tokens": 24, "temperature": 0}' | tee /tmp/answer
}

check "Compose starts" "${compose[@]}" up --no-build --pull never --detach --wait --wait-timeout 300 "${ours[@]}"
check "HTTP answers" answers
first="$(cat /tmp/answer 2>/dev/null | sed -nE 's/.*"text":"([^"]*)".*/\1/p')"
check "gRPC answers" "${compose[@]}" exec -T coordinator specdec generate --address 127.0.0.1:50051 --max-tokens 8 "def f("
check "the page is there" sh -c 'curl --silent --fail http://127.0.0.1:8000/ | grep -qi "<html"'
check "metrics are there" "${compose[@]}" exec -T gateway python3 -c \
    'import urllib.request as u; assert b"specdec_gateway" in u.urlopen("http://127.0.0.1:9094/metrics").read()'
check "a killed draft is restarted" sh -c "$(printf '%q ' "${compose[@]}") kill --signal KILL draft; sleep 3
    $(printf '%q ' "${compose[@]}") up --no-build --pull never --detach --wait --wait-timeout 180 draft"
check "the answer is the same afterwards" sh -c "$(declare -f answers); answers | grep -qF -- \"\$0\"" "$first"
check "Compose ends" "${compose[@]}" down --volumes --timeout 60
echo "$num_passed passed, $num_failed failed"
[[ $num_failed == 0 ]]
