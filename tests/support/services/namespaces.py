"""Machines that are not there: network namespaces whose packets this process carries, with delay and loss.

The kernel need not have netem. Each machine's interface, and one of this machine, is a TUN device; a thread reads every
packet, and writes it to its destination later, or never. Needs root, iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MOST_PACKET_BYTES = 1 << 16


def can_make_machines() -> bool:
    """Whether this process may make namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and os.path.exists("/dev/net/tun")


@dataclass(eq=False)
class Machine:
    """A namespace with one address, which this process's namespace reaches, too."""

    name: str
    address: str
    delay_s: float = 0.0
    """Time that a packet from it takes."""
    jitter_s: float = 0.0
    """Greatest random time on top."""
    loss: float = 0.0
    """Share of its packets that are lost."""
    is_cut_off: bool = False
    """Whether all packets from and to it are lost; its own interface stays up, as behind a broken switch."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process on it, in a session of its own; its output is appended to a file."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def signal_all(self, number: signal.Signals) -> None:
        """Signal all its processes."""
        for pid in map(int, _ran("ip", "netns", "pids", self.name).split()):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class _Switch:
    """Carries packets between TUN devices."""

    def __init__(self, ports: dict[int, Machine]) -> None:
        self._ports = ports
        self._by_address = {bytes(map(int, machine.address.split("."))): fd for fd, machine in ports.items()}
        self._waiting: list[tuple[float, int, int, bytes]] = []  # when, order, to which device, packet
        self._count = 0
        self._random = random.Random(1)
        self._stop_fd = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)

    def _run(self) -> None:
        poller = select.poll()
        for fd in (self._stop_fd, *self._ports):
            poller.register(fd, select.POLLIN)
        while True:
            wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else 1.0
            for fd, _ in poller.poll(wait_s * 1000):
                if fd == self._stop_fd:
                    return
                with suppress(BlockingIOError):
                    while True:
                        self._take(self._ports[fd], os.read(fd, _MOST_PACKET_BYTES))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, fd, packet = heapq.heappop(self._waiting)
                with suppress(OSError):  # a device that is down, or full
                    os.write(fd, packet)

    def _take(self, source: Machine, packet: bytes) -> None:
        target_fd = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if target_fd is None or source.is_cut_off or self._ports[target_fd].is_cut_off:
            return
        if self._random.random() < source.loss:
            return
        self._count += 1
        at_s = time.monotonic() + source.delay_s + self._random.random() * source.jitter_s
        heapq.heappush(self._waiting, (at_s, self._count, target_fd, packet))


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Machines on one switch, with all their processes killed at the end."""
    number = os.getpid() % 60000
    subnet = f"10.{100 + number // 250 % 150}.{number % 250}"
    made = [Machine(f"sd{number}n{index}", f"{subnet}.{index + 1}") for index in range(count)]
    ports: dict[int, Machine] = {}
    switch: _Switch | None = None
    try:
        for index, machine in enumerate((*made, Machine("", f"{subnet}.254"))):
            device = f"sd{number}t{index}"
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            ports[fd] = machine
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
            inside: tuple[str, ...] = ()
            if machine.name:
                _ran("ip", "netns", "add", machine.name)
                _ran("ip", "link", "set", device, "netns", machine.name)
                inside = ("ip", "netns", "exec", machine.name)
                _ran(*inside, "ip", "link", "set", "lo", "up")
            _ran(*inside, "ip", "addr", "add", f"{machine.address}/24", "dev", device)
            _ran(*inside, "ip", "link", "set", device, "up")
        switch = _Switch(ports)
        yield made
    finally:
        for machine in made:
            with suppress(subprocess.CalledProcessError):
                machine.signal_all(signal.SIGKILL)
            for process in machine.processes:
                process.kill()
                process.wait()
        if switch is not None:
            switch.stop()
        for fd in ports:
            os.close(fd)
        for machine in made:
            subprocess.run(["ip", "netns", "del", machine.name], check=False, capture_output=True)


def _ran(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
