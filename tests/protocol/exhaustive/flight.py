"""What is on its way on a network on which nothing arrives by itself, and what can happen to it."""

from __future__ import annotations

from collections.abc import Mapping

from tests.protocol.exhaustive.replica_life import STREAMS
from tests.protocol.simulation.network import Network
from tests.protocol.simulation.pipes import Call, Message, Pipe


class Flight:
    """Events are a kind and a place: the number of a call, and `>` or `<` for its direction."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def arrivals(self) -> list[str]:
        """The next message of a stream arrives; or, after a cut, it is lost with all that follow, up to the end."""
        events = []
        for where, pipe in self._pipes():
            events.append(f"arrive {where}")
            if pipe.is_cut and len(pipe.sent) > 1:
                events.append(f"lose {where}")
        return events

    def disorders(self, left: Mapping[str, int]) -> list[str]:
        """What gRPC does not do, as often as it may still happen."""
        events = []
        for where, pipe in self._pipes():
            if self._call(where).method in STREAMS and isinstance(pipe.sent[0], Message):
                events += [f"{kind} {where}" for kind in ("repeat", "drop") if left[kind] > 0]
                if left["swap"] > 0 and len(pipe.sent) > 1 and isinstance(pipe.sent[1], Message):
                    events.append(f"swap {where}")
        return events

    def apply(self, kind: str, where: str) -> None:
        """Let it happen."""
        pipe = self._call(where).pipes[where[-1] == "<"]
        match kind:
            case "arrive":
                pipe.deliver()
            case "lose":
                while len(pipe.sent) > 1:
                    pipe.sent.popleft()
                pipe.deliver()
            case "repeat":
                pipe.sent.insert(1, pipe.sent[0])
            case "drop":
                pipe.sent.popleft()
            case "swap":
                pipe.sent.insert(1, pipe.sent.popleft())
            case _:
                raise ValueError(f"unknown event {kind!r}")

    def sink_of(self, where: str) -> str:
        """Who gets what arrives there; empty where nothing does any more."""
        number = int(where[:-1])
        for call in self._network.calls:
            if call.number == number:
                return call.pipes[where[-1] == "<"].sink.name
        return ""

    def has_stream(self, client: str, server: str) -> bool:
        """Whether there is a stream between two nodes that both take for alive."""
        calls = [call for call in self._network.calls if (call.client.name, call.server.name) == (client, server)]
        return any(call.method in STREAMS and not call.requests.is_cut for call in calls)

    def _pipes(self) -> list[tuple[str, Pipe]]:
        return [
            (f"{call.number}{way}", pipe)
            for call in self._network.calls
            for way, pipe in zip("><", call.pipes, strict=True)
            if pipe.sent
        ]

    def _call(self, where: str) -> Call:
        number = int(where[:-1])
        return next(call for call in self._network.calls if call.number == number)
