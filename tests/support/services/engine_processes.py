"""The engines of running services."""

from __future__ import annotations

import psutil

from specdec.commands.up.cluster import Cluster

_MODULE = "specdec.replica.bridge.engine_child"


def engine_of(cluster: Cluster, name: str) -> psutil.Process:
    """The one engine process of a replica."""
    (engine,) = (p for p in psutil.Process(cluster.services[name].pid).children() if _MODULE in p.cmdline())
    return engine
