"""Devices by their vendors' figures, and what an hour of each is assumed to cost."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace

_LEAST_PRICE, _MOST_PRICE = 1e-4, 1e6
"""Dollars per hour. Prices of 0 would make all deployments equally cheap."""


class PlanImpossible(Exception):
    """The input leaves no plan; the message says what would be possible, in one line."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU by its vendor's figures."""

    name: str
    bandwidth: float
    """Bytes per second."""
    flops: float
    """Dense bfloat16 products and sums, per second."""
    memory: float
    """Bytes."""
    per_node: int
    """GPUs of a usual node, and so the most ranks of a replica."""
    price: float
    """Assumed price of an hour, in dollars."""


DEVICES = {
    device.name: device
    for device in (
        Device("L4", 0.30e12, 121e12, 24e9, 4, 0.8),
        Device("L40S", 0.864e12, 362e12, 48e9, 4, 1.9),
        Device("RTX-3090", 0.936e12, 71e12, 24e9, 4, 0.3),
        Device("RTX-4090", 1.008e12, 165e12, 24e9, 4, 0.5),
        Device("A100-40", 1.555e12, 312e12, 40e9, 8, 1.8),
        Device("A100", 2.039e12, 312e12, 80e9, 8, 2.2),
        Device("H100", 3.35e12, 989e12, 80e9, 8, 3.5),
        Device("H200", 4.8e12, 989e12, 141e9, 8, 4.5),
        Device("B200", 8.0e12, 2250e12, 180e9, 8, 7.0),
    )
}
"""Prices are of no seller: give your own with NAME=PRICE."""


def devices_of(text: str) -> list[Device]:
    """Devices of a flag's value: names separated by commas, each with =PRICE per hour if it differs.

    Raises PlanImpossible: a name or price is unknown; the message has the known names.
    """
    found: dict[str, Device] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, has_price, price = part.partition("=")
        device = device_named(name.strip())
        if has_price:
            device = replace(device, price=_price(name, price))
        found[device.name] = device
    if not found:
        raise PlanImpossible(f"no device is named; known are {', '.join(DEVICES)}")
    return list(found.values())


def device_named(name: str) -> Device:
    """A device by its name, whatever its case, blanks and dashes. Raises PlanImpossible."""
    by_key = {_key(known): device for known, device in DEVICES.items()}
    key = _key(name)
    if key not in by_key:
        near = difflib.get_close_matches(key, by_key, n=1, cutoff=0.5)
        hint = f"did you mean {by_key[near[0]].name}? Known" if near else "known"
        raise PlanImpossible(f"there is no device {name[:40]!r}: {hint} are {', '.join(DEVICES)}")
    return by_key[key]


def measured_machine(text: str) -> Device:
    """The machine of a measurement, NAME or NAME=PRICE; its step times are measured, so it has no figures.

    Raises PlanImpossible: several are named, or the price is none.
    """
    if "," in text:
        raise PlanImpossible(f"a measurement is of one machine, and {text[:60]!r} names several: give NAME=PRICE")
    name, has_price, price = text.strip().partition("=")
    return Device(name or "measured", 0.0, 0.0, 0.0, 1, _price(name, price) if has_price else 1.0)


def _key(name: str) -> str:
    key = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")
    return re.sub(r"(sxm\d*|pcie|80gb|80)$", "", key) or key


def _price(name: str, text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not _LEAST_PRICE <= price <= _MOST_PRICE:
        raise PlanImpossible(
            f"the price {text[:20]!r} of {name[:40]} is not a number from {_LEAST_PRICE:g} to {_MOST_PRICE:,.0f}, in "
            "dollars per hour"
        )
    return price
