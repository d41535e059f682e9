"""Structured logs, and the metrics of each service.

Metrics are named specdec_<service>_..., or specdec_tls_... and specdec_build_info where all services have them; the
gateway and the
coordinator export some under vLLM's names, too. Each is defined here, and only here, with a query that uses it. The
process that constructs a group exports it.
A target or draft is two processes, and a coordinator can be several, so their metrics go through prometheus_client's
multiprocess files (`enable_multiprocess_metrics`), and /metrics merges them
(`scrape_registry`).
`python -m specdec.telemetry.catalogue` writes docs/metrics.md.
"""

from specdec.telemetry.coordinator_metrics import CoordinatorMetrics, SupervisorMetrics
from specdec.telemetry.draft_metrics import DraftMetrics
from specdec.telemetry.gateway_metrics import GatewayMetrics, VllmMetrics
from specdec.telemetry.logs.setup import setup_logging
from specdec.telemetry.metric_files import (
    enable_multiprocess_metrics,
    forget_gauges,
    forget_gauges_of,
    metrics_folder,
    scrape_registry,
)
from specdec.telemetry.picker_metrics import CoordinatorPickerMetrics, PickerMetrics
from specdec.telemetry.registry import BuildInfo
from specdec.telemetry.relay_metrics import RelayMetrics
from specdec.telemetry.tallies import Tallies
from specdec.telemetry.target_metrics import TargetMetrics
from specdec.telemetry.tls_metrics import TlsMetrics

__all__ = [
    "BuildInfo",
    "CoordinatorMetrics",
    "CoordinatorPickerMetrics",
    "DraftMetrics",
    "GatewayMetrics",
    "PickerMetrics",
    "RelayMetrics",
    "SupervisorMetrics",
    "Tallies",
    "TargetMetrics",
    "TlsMetrics",
    "VllmMetrics",
    "enable_multiprocess_metrics",
    "forget_gauges",
    "forget_gauges_of",
    "metrics_folder",
    "scrape_registry",
    "setup_logging",
]
