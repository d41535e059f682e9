"""Cases in which every two of the chart's big switches meet."""

from __future__ import annotations

from typing import Any

from tests.support.pairwise import pairwise_cases

Values = dict[str, Any]

_CERTIFICATES = {
    name: f"{name[0]}-tls" for name in ("coordinator", "gateway", "target", "draft", "redis", "prometheus")
}
_SWITCHES: dict[str, dict[str, Values]] = {
    "redis": {
        "none": {},
        "bundled": {"redis": {"mode": "bundled"}},
        "external": {
            "redis": {
                "mode": "external",
                "external": {
                    "url": "rediss://redis.example.com:6380/1",
                    "existingSecret": "redis",
                    "usernameKey": "username",
                    "passwordKey": "password",
                    "tls": {"existingSecret": "redis-tls"},
                },
            }
        },
    },
    "tls": {
        "off": {},
        "secrets": {"tls": {"enabled": True, "mutual": False, "existingSecrets": _CERTIFICATES}},
        "mutual": {
            "tls": {
                "enabled": True,
                "verifyClients": True,
                "metrics": True,
                "certManager": {"enabled": True, "issuerRef": {"name": "internal"}},
            }
        },
    },
    "api-keys": {
        "off": {},
        "on": {
            "apiKeys": {"existingSecret": "specdec-api-keys"},
            "test": {"apiKeySecret": {"name": "test-key", "key": "api-key"}},
        },
    },
    "network-policy": {
        "off": {"networkPolicy": {"enabled": False}},
        "ingress": {"networkPolicy": {"clients": [{"podSelector": {}}], "httpClients": [{"podSelector": {}}]}},
        "egress": {"networkPolicy": {"egress": {"enabled": True}}},
    },
    "monitoring": {
        "off": {},
        "on": {
            "serviceMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True, "runbookBaseUrl": "https://runbooks.example.com/specdec"},
            "dashboards": {"enabled": True},
            "tracing": {"endpoint": "http://collector:4317"},
        },
    },
    "autoscaling": {
        "off": {},
        "on": {
            "coordinator": {"autoscaling": {"enabled": True}},
            "gateway": {"autoscaling": {"enabled": True}},
            "target": {"autoscaling": {"enabled": True, "prometheusAddress": "http://prometheus:9090"}},
            "draft": {"autoscaling": {"enabled": True, "prometheusAddress": "http://prometheus:9090"}},
        },
    },
}


def toggle_cases() -> dict[str, dict[str, Any]]:
    """Cases as in cases.yaml, by names that tell their switches."""
    cases = {}
    for positions in pairwise_cases({name: list(settings) for name, settings in _SWITCHES.items()}):
        values: Values = {}
        for switch, position in positions.items():
            # No two switches set the same top-level key.
            values |= _SWITCHES[switch][position]
        if positions["network-policy"] == positions["api-keys"] == "off":  # else the gateway would refuse to serve
            values["gateway"] = {**values.get("gateway", {}), "settings": {"allow_unauthenticated": True}}
        name = "+".join(f"{switch}={position}" for switch, position in positions.items())
        cases[name] = {"values": values}
    return cases
