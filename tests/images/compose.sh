# Sourced by try.sh: types the container part of docs/tutorial.md, then breaks what it started.
mapfile -t typed < <(sed -n '/^## In containers/,/^## On/p' docs/tutorial.md | sed -n '/^```sh/,/^```/p' | grep -v '^```')
services=(target draft coordinator gateway)
compose=(docker compose --file deploy/compose.yaml)

# The reader's environment is elsewhere; the coordinator's image has the same commands.
mkdir -p .venv/bin
printf '#!/bin/sh\nexec docker run --rm --network host --entrypoint specdec specdec-coordinator:%s "$@"\n' "$version" > .venv/bin/specdec
chmod +x .venv/bin/specdec

container() {  # container SERVICE
    "${compose[@]}" ps --all --quiet "$1"
}

up_again() {  # up_again SERVICE...
    "${compose[@]}" up --no-build --pull never --detach --wait --wait-timeout 300 "$@"
}

answers() {
    curl --silent --fail --max-time 60 http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \
        -d '{"prompt": "def fibonacci(n):", "max_tokens": 24, "temperature": 0}' | sed -nE 's/.*"text":"([^"]*)".*/\1/p' | tee /tmp/answer
    [[ -s /tmp/answer ]]
}

answers_the_same() {
    answers && [[ $(cat /tmp/answer) == "$first" ]]
}

streams() {  # streams FILE: the text of a long answer, as far as it has come
    curl --silent --no-buffer --max-time 120 http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \
        -d '{"prompt": "def fibonacci(n):", "max_tokens": 1000, "temperature": 0, "ignore_eos": true, "stream": true}' > "$1"
}

text_of() {  # text_of FILE: of a complete stream
    grep -q '^data: \[DONE\]' "$1" || { echo "the stream was cut off:"; tail -c 300 "$1"; return 1; }
    sed -nE 's/^data: .*"text":"(([^"\\]|\\.)*)".*/\1/p' "$1" | tr -d '\n'
}

drains_a_stream() {  # drains_a_stream SERVICE: SIGTERM in mid-stream; the stream's text is the whole one
    local id stream
    id="$(container "$1")"
    rm -f /tmp/stream  # Else the last one may be read before this one has begun.
    streams /tmp/stream &
    stream=$!
    until [[ $(grep -c '^data: {' /tmp/stream 2> /dev/null) -ge 3 ]] || ! kill -0 "$stream" 2> /dev/null; do sleep 0.02; done
    grep -q '\[DONE\]' /tmp/stream && { echo "the stream ended before the signal"; return 1; }
    "${compose[@]}" stop "$1"
    wait "$stream"
    [[ $(docker inspect --format '{{.State.ExitCode}}' "$id") == 0 ]] || { echo "exit code not 0"; return 1; }
    [[ $(text_of /tmp/stream) == "$whole" ]] || { echo "another text"; text_of /tmp/stream | tail -c 300; return 1; }
    up_again "${services[@]}"
}

restarts_after() {  # restarts_after SERVICE SIGNAL PID: Docker restarts it by itself, until it is healthy
    local id before
    id="$(container "$1")"
    before="$(docker inspect --format '{{.RestartCount}}' "$id")"
    kill -s "$2" "$3"
    for _ in $(seq 180); do
        read -r count health < <(docker inspect --format '{{.RestartCount}} {{.State.Health.Status}}' "$id")
        ((count > before)) && [[ $health == healthy ]] && return 0
        sleep 1
    done
    docker inspect --format '{{json .State.Health}}' "$id"
    return 1
}

init_of() {  # init_of SERVICE: its container's first process
    docker inspect --format '{{.State.Pid}}' "$(container "$1")"
}

answers_for_a_frozen_engine() {  # the target's engine is the process that has torch
    local before engine service
    before="$(docker inspect --format '{{.RestartCount}}' "$(container target)")"
    service="$(pgrep --parent "$(init_of target)" | head -n 1)"
    engine="$(ps --ppid "$service" --sort -rss -o pid= | head -n 1)"
    kill -s STOP "${engine// /}"
    answers_the_same && [[ $(docker inspect --format '{{.RestartCount}}' "$(container target)") == "$before" ]]
}

asks_prometheus() {  # asks_prometheus QUERY VALUE: within a minute the first value is that
    for _ in $(seq 60); do
        curl --silent --get http://127.0.0.1:9090/api/v1/query --data-urlencode "query=$1" > /tmp/answer
        grep -q "\"value\":\[[0-9.]*,\"$2\"\]" /tmp/answer && return 0
        sleep 1
    done
    cat /tmp/answer
    return 1
}

evaluates_rules() {
    curl --silent http://127.0.0.1:9090/api/v1/rules > /tmp/answer
    grep -q '"health":"ok"' /tmp/answer && ! grep -o '"lastError":"[^"]*"' /tmp/answer
}

spent_ms() {  # the processor time of all processes of this namespace that run, and of those that they waited for
    cat /proc/[0-9]*/stat 2> /dev/null | sed 's/.*) //' | awk -v hz="$(getconf CLK_TCK)" '{ s += $12 + $13 + $14 + $15 } END { printf "%d", s * 1000 / hz }'
}

idles() {  # idles SECONDS: all services, their health checks, Prometheus and Docker take less than a third of a core
    local before after
    before="$(spent_ms)"
    sleep "$1"
    after="$(spent_ms)"
    echo "measured idle services with their health checks and Docker: $(((after - before) / $1)) ms of CPU each second, at most 333" | tee -a /tmp/measured
    (((after - before) / $1 < 333))
}

starts_under_load() {  # four processes that take what they get, on however many cores there are
    local loads=() id
    for _ in 1 2 3 4; do
        while :; do :; done &
        loads+=("$!")
    done
    timeout 600 "${compose[@]}" up --no-build --pull never --detach --wait
    local code=$?
    kill "${loads[@]}"
    ((code == 0)) || return 1
    for id in $("${compose[@]}" ps --all --quiet); do
        [[ $(docker inspect --format '{{.RestartCount}} {{.State.Health.Status}}' "$id") == "0 healthy" ]] || { docker inspect "$id"; return 1; }
    done
}

for line in "${typed[@]}"; do
    [[ $line == deploy/build.sh* ]] || check "tutorial: $line" eval "$line < /dev/null"
done
if [[ $num_failed != 0 && -z $(docker ps --quiet --filter name=gateway --filter health=healthy) ]]; then
    "${compose[@]}" ps --all
    "${compose[@]}" logs --tail 20
    return
fi
check "HTTP answers" answers
first="$(cat /tmp/answer)"
check "gRPC answers" .venv/bin/specdec generate --temperature 0 --max-tokens 24 "def fibonacci(n):"
check "the page is there" sh -c 'curl --silent --fail http://127.0.0.1:8000/ | grep -qi "<html"'
for name in "${services[@]}"; do
    check "$name, specdec health" costs_at_most 100 docker exec "$(container "$name")" -- specdec health --timeout-s=5
done
check "Prometheus scrapes all services" asks_prometheus 'count(count by (job) (up == 1))' "${#services[@]}"
check "Prometheus has our metrics" asks_prometheus 'count(count by (job) ({__name__=~"specdec_.+"}))' "${#services[@]}"
check "Prometheus evaluates our rules" evaluates_rules
check "idle services cost little" idles 40
check "a long stream" streams /tmp/stream
whole="$(text_of /tmp/stream)" || true
for name in "${services[@]}"; do
    check "SIGTERM of the $name in mid-stream loses no token" drains_a_stream "$name"
    check "the answer is the same after SIGTERM of the $name" answers_the_same
done
for name in "${services[@]}"; do
    check "a killed $name is restarted" restarts_after "$name" KILL "$(init_of "$name")"
    check "the answer is the same after the $name was killed" answers_the_same
done
for name in "${services[@]}"; do
    check "a frozen $name is restarted" restarts_after "$name" STOP "$(pgrep --parent "$(init_of "$name")" | head -n 1)"
    check "the answer is the same after the $name was frozen" answers_the_same
done
check "the answer is the same from a target whose engine was frozen, without a restart" answers_for_a_frozen_engine
check "Compose ends" "${compose[@]}" down --timeout 60
check "Compose starts under load, and no health check kills a service" starts_under_load
check "the answer is the same under load" answers_the_same
check "Compose ends with its volumes" "${compose[@]}" down --volumes --timeout 60
