#!/usr/bin/env bash
# Builds the images from the unchanged Dockerfile, with the made base image under the name of the Dockerfile's.
set -euo pipefail
cd /work
label='{{index .Config.Labels "specdec.base"}}'
if [[ $(docker image inspect --format "$label" python:3.11-slim-bookworm 2> /dev/null) != "$BASE_KEY" ]]; then
    docker import --change 'CMD ["python3"]' --change "LABEL specdec.base=$BASE_KEY" base.tar python:3.11-slim-bookworm > /dev/null
fi
if [[ -n $(ls wheels) ]]; then
    # Builds see no files but the context's: wheels come over loopback.
    docker run --detach --rm --name wheels --network host --volume /work/wheels:/wheels:ro --workdir /wheels \
        python:3.11-slim-bookworm python3 -m http.server --bind 127.0.0.1 8099 > /dev/null
    trap 'docker rm --force wheels > /dev/null' EXIT
    export TORCH_CPU_PIP_ARGS="--find-links http://127.0.0.1:8099/"
fi
failed=0
for target in coordinator gateway engine-cpu; do
    BUILDER="docker build --network host" deploy/build.sh "$target" > "/work/$target.log" 2>&1 ||
        { failed=1; echo "$target: not built"; tail -n 25 "/work/$target.log"; }
done
exit "$failed"
