"""Deployments that are measured: they leave each other room, and a proxy puts drafts on another host."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

from bench.delay_proxy import DelayProxy
from bench.deployment import MeasuredDeployment, _plan
from bench.pairs import resolve_pair
from specdec.commands.up.service_process import ServiceSpec

_PER_TOKEN = 2 * 10 * 2 * 64
"""Keys and values, layers, heads, their size: of the shipped target."""


def test_deployments_on_one_gpu_take_no_more_than_their_requests_need() -> None:
    pair = resolve_pair("shipped", "cpu")
    small = _plan(MeasuredDeployment(pair=pair, cores=(0, 1), device="cuda", most_tokens=1000))
    assert small.target_settings["kv_cache_memory_bytes"] == small.draft_settings["kv_cache_memory_bytes"] == 1 << 30
    large = _plan(MeasuredDeployment(pair=pair, cores=(0, 1), device="cuda", most_tokens=1_000_000))
    assert large.target_settings["kv_cache_memory_bytes"] == 2 * _PER_TOKEN * (1_000_000 + 4096)
    alone = _plan(MeasuredDeployment(pair=pair, cores=(0, 1), device="cuda", is_plain=True))
    assert (alone.num_drafts, dict(alone.draft_settings)) == (0, {})
    on_cpu = _plan(MeasuredDeployment(pair=pair, cores=(0, 1), most_tokens=1_000_000))
    assert on_cpu.target_settings["kv_cache_memory_bytes"] == 4 * _PER_TOKEN * (1_000_000 + 4096)
    assert dict(on_cpu.draft_settings) == {}


def test_a_delaying_link_delivers_everything_in_order_and_late() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, DelayProxy(()) as proxy:
        host, _, port = proxy.before(f"127.0.0.1:{listener.getsockname()[1]}").rpartition(":")
        proxy.delay(30.0)
        with socket.create_connection((host, int(port))) as near:
            far, _ = listener.accept()
            with far:
                near.settimeout(30)
                far.settimeout(30)
                began_s = time.monotonic()
                for number in range(50):
                    near.sendall(bytes([number]))
                received = b""
                while len(received) < 50:
                    received += far.recv(64)
                assert received == bytes(range(50))
                assert time.monotonic() - began_s >= 0.03
                proxy.delay(0.0)
                far.sendall(b"back")
                assert near.recv(4) == b"back"
                near.close()
                assert far.recv(1) == b""


_CONNECTS = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as end:
    began_s = time.monotonic()
    end.sendall(b".")
    said = b""
    while len(said) < 17:
        said += end.recv(99)
    print(time.monotonic() - began_s, said.decode())
"""
"""Sends a byte, and tells the time to the answer, and the answer."""


def test_only_drafts_are_far_from_a_target_and_reach_no_socket_of_its_host() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    target = ServiceSpec(name="target", role="target", module="", address=address)
    asks = ServiceSpec(
        name="draft", role="draft", module="", address="127.0.0.1:1", arguments=(f"--target={address}",),
        environment={"SPECDEC_DRAFT_LINK_TARGETS": f'["{address}"]'},
    )  # fmt: skip
    with listener, DelayProxy(()) as proxy:
        _, draft = proxy.far_drafts([target, asks])
        seen_at = draft.arguments[0].removeprefix("--target=")
        assert draft.environment == {"SPECDEC_DRAFT_LINK_TARGETS": f'["{seen_at}"]'}
        assert seen_at != address
        proxy.delay(40.0)
        told = {}
        for module in ("specdec.draft_service", "specdec.coordinator"):
            command = [sys.executable, "-c", _CONNECTS, *seen_at.split(":"), module]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                near, _ = listener.accept()
                with near:
                    assert near.recv(1) == b"."
                    near.sendall(b"specdec-link-0123")
                    told[module] = process.communicate(timeout=30)[0].split()
    assert float(told["specdec.draft_service"][0]) >= 0.08
    assert told["specdec.draft_service"][1] == "specdec-none-0123"
    assert told["specdec.coordinator"][1] == "specdec-link-0123"
