"""The clusters of tests/integration, for tests of the whole product."""

from __future__ import annotations

from tests.integration.conftest import (  # noqa: F401  pytest finds fixtures by name
    make_cluster,
    shipped_client,
    shipped_cluster,
    shipped_pair,
    tiny_client,
    tiny_cluster,
    tiny_pair,
)
