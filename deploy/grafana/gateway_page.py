"""The page on gateways."""

from __future__ import annotations

from typing import Any

from panels import Panel, Row, dashboard
from promql import OF_INSTANCE, TOKENS_PER_S, quantiles, rate, ratio

_G = "specdec_gateway"
_OF = OF_INSTANCE
_FAULTS = rate(f'{_G}_requests_total{{status=~"5..",route!~"/health|/ping",{_OF[1:]}')
_BROKEN = rate(f"{_G}_stream_errors_total{_OF}")
_ALL = rate(f'{_G}_requests_total{{route!~"/health|/ping",{_OF[1:]}')


def gateway() -> dict[str, Any]:
    """Return the dashboard."""
    return dashboard(
        "specdec-gateway",
        "specdec / Gateways",
        "Requests of HTTP clients, and the gateways' calls of coordinators.",
        [Row("HTTP clients", _clients()), Row("Coordinators", _coordinators()), Row("Output", _output())],
        f"{_G}_requests_running",
    )


def _clients() -> list[Panel]:
    return [
        Panel(
            "Gateways",
            "Scraped processes. At 0 HTTP clients are not served.",
            {"gateways": f"count({_G}_requests_running{_OF}) or vector(0)"},
            "short",
            "stat",
            4,
            ((None, "red"), (1, "green")),
            "SpecdecGatewayDown",
        ),
        Panel(
            "HTTP requests that fail",
            "Share of requests with an answer 5xx or a stream that ended in an error, without health checks. Faults of "
            "coordinators are also in their failing requests.",
            {"failing": f"(({_FAULTS} or vector(0)) + {_BROKEN}) / {_ALL}"},
            "percentunit",
            width=10,
            alert="SpecdecGatewayErrors",
        ),
        Panel(
            "HTTP requests by status",
            "Answers per second. 499: the client left before an answer began; 429: no place or no quota, see the "
            "coordinators' *Not admitted*; other 4xx: the client's faults.",
            {"{{status}}": rate(f"{_G}_requests_total{_OF}", "status")},
            "reqps",
            width=10,
        ),
        Panel(
            "HTTP requests running",
            "Running requests by gateway; at most max_concurrent_requests.",
            {"{{instance}}": f"{_G}_requests_running{_OF}"},
        ),
        Panel(
            "HTTP requests by path",
            "Answers per second.",
            {"{{route}}": rate(f"{_G}_requests_total{_OF}", "route")},
            "reqps",
        ),
        Panel(
            "Clients that left",
            "Requests per second whose client left before their end; the gateway cancels them at the coordinator.",
            {"left": rate(f"{_G}_clients_gone_total{_OF}")},
            "reqps",
        ),
    ]


def _coordinators() -> list[Panel]:
    return [
        Panel(
            "Calls that went to another coordinator",
            "Share of requests whose coordinator did not answer, or not to the end. Clients lose only time.",
            {"failovers": ratio(f"{_G}_failovers_total{_OF}", f"{_G}_requests_total{_OF}")},
            "percentunit",
            alert="SpecdecGatewayFailovers",
        ),
        Panel(
            "Time to first token over HTTP",
            "Time from the call of a coordinator to its first output. The difference from the coordinators' *Time to "
            "first token* is the gateway and the network.",
            quantiles(f"{_G}_time_to_first_token_seconds", _OF),
            "s",
        ),
        Panel(
            "Length of HTTP requests",
            "Time from the headers to the end of the answer.",
            quantiles(f"{_G}_request_seconds", _OF),
            "s",
        ),
    ]


def _output() -> list[Panel]:
    return [
        Panel(
            "Tokens over HTTP",
            "Tokens per second of successful requests, counted when they end.",
            {
                "prompt": rate(f"{_G}_prompt_tokens_total{_OF}"),
                "output": rate(f"{_G}_output_tokens_total{_OF}"),
            },
            TOKENS_PER_S,
            width=24,
        ),
    ]
