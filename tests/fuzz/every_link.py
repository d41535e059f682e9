"""The links that are attacked, each from both ends."""

from tests.fuzz.links import (
    bridge,
    client,
    coordinator,
    direct,
    engine_frames,
    http,
    metrics,
    nodes,
    ranks,
    replicas,
    store,
    worker,
)

ALL = {
    link.name: link
    for link in (
        bridge.LINK,
        engine_frames.LINK,
        ranks.LINK,
        nodes.LEADER,
        nodes.NODE,
        client.LINK,
        http.LINK,
        coordinator.LINK,
        metrics.LINK,
        store.LINK,
        worker.TARGET,
        worker.DRAFT,
        direct.TO_TARGET,
        direct.TO_DRAFT,
        replicas.TARGET,
        replicas.DRAFT,
    )
}
