"""How much a service keeps: the sizes of all containers that its objects hold, by class and attribute."""

from __future__ import annotations

import functools
import gc
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

_CONTAINERS = (list, tuple, set, frozenset, deque, bytearray)


def sizes(*roots: object) -> Counter[str]:
    """Items of all containers that are reached from these objects through objects of specdec, by `Class.attribute`."""
    gc.collect()
    found: Counter[str] = Counter()
    seen: dict[int, object] = {}  # kept, so that no id is used twice
    todo: list[tuple[object, str]] = [(root, "") for root in roots]
    while todo:
        each, where = todo.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, Mapping):
            found[where] += len(each)
            todo += [(value, f"{where}[]") for pair in list(each.items()) for value in pair]
        elif isinstance(each, _CONTAINERS):
            found[where] += len(each)
            todo += [(value, f"{where}[]") for value in list(each)]
        else:
            todo += _held_by(each)
    return found


def grown(before: Counter[str], after: Counter[str], by: int) -> dict[str, int]:
    """Places with at least `by` more items than before."""
    return {where: after[where] - before[where] for where in after if after[where] - before[where] >= by}


def _held_by(each: object) -> Iterator[tuple[object, str]]:
    if isinstance(each, MethodType):
        yield each.__self__, ""
    elif isinstance(each, functools.partial):
        yield from ((value, "") for value in (each.func, *each.args, *each.keywords.values()))
    elif type(each).__module__.startswith("specdec"):
        name = type(each).__name__
        slots = (slot for kind in type(each).__mro__ for slot in getattr(kind, "__slots__", ()))
        values: dict[str, Any] = {slot: getattr(each, slot, None) for slot in slots}
        values |= getattr(each, "__dict__", {})
        yield from ((value, f"{name}.{attribute}") for attribute, value in values.items())
