#!/usr/bin/env bash
# Builds the images with docs/tutorial.md's command, from the unchanged Dockerfile, with the made base image under the name
# of the Dockerfile's; and stand-ins for the images that only a registry has, of Debian's packages.
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
    curl --silent --fail --retry 20 --retry-delay 1 --retry-connrefused --output /dev/null http://127.0.0.1:8099/
    docker inspect --format 'wheels come from a container that is {{.State.Status}}' wheels  # and not from another that has the port
    export TORCH_CPU_PIP_ARGS="--find-links http://127.0.0.1:8099/"
fi
export BUILDER="docker build --network host"

of_others() {  # of_others IMAGE: the image that deploy/compose.yaml names
    sed -nE "s|^ *image: \\$\{$1_IMAGE:-(.*)\}$|\1|p" deploy/compose.yaml
}

# Redis and Prometheus are Debian's; Grafana is in no package, so that its stand-in answers its health check only.
servers='FROM python:3.11-slim-bookworm AS servers
RUN apt-get update && apt-get install --yes --no-install-recommends redis-server prometheus wget && rm -rf /var/lib/apt/lists/*
FROM servers AS redis
FROM servers AS prometheus
RUN rm -rf /etc/prometheus && install -d -o nobody -g nogroup /prometheus
USER nobody
WORKDIR /prometheus
ENTRYPOINT ["prometheus"]
FROM servers AS grafana
RUN install -d /srv/api && touch /srv/api/health
USER 472
ENTRYPOINT ["python3", "-m", "http.server", "3000", "--directory", "/srv"]'
for name in REDIS PROMETHEUS GRAFANA; do
    $BUILDER --target "${name,,}" --tag "$(of_others "$name")" - <<< "$servers" > "/work/${name,,}.log" 2>&1 ||
        { echo "the stand-in for $(of_others "$name") was not built"; tail -n 25 "/work/${name,,}.log"; exit 1; }
done

command="$(grep -m 1 '^deploy/build.sh' docs/tutorial.md)"
echo "\$ $command"
bash -c "$command" > /work/images.log 2>&1 || { tail -n 40 /work/images.log; exit 1; }
grep '^specdec-.* sha256:' /work/images.log
