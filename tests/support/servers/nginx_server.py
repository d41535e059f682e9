"""A real nginx before a gateway or a coordinator, with default settings: HTTP/1.0 to gateways, buffers, time-outs."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from specdec.commands.up.cluster import free_port

_START_S = 30.0
_POLL_S = 0.01
_CONFIG = """
user root;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    gzip on;
    server {{
        listen 127.0.0.1:{port}{http2};
        location / {{
            {passes}://127.0.0.1:{upstream};
            {more}
        }}
    }}
}}
"""
"""Beside files and ports, what Debian's nginx.conf has."""


@contextlib.contextmanager
def nginx(upstream: int, folder: Path, more: str = "", *, speaks_grpc: bool = False) -> Iterator[str]:
    """The URL of an nginx before this port. `more`: directives of the location."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    assert program is not None, "nginx is missing: run `make servers`"
    port = free_port()
    config = folder / "nginx.conf"
    http2, passes = (" http2", "grpc_pass grpc") if speaks_grpc else ("", "proxy_pass http")
    config.write_text(
        _CONFIG.format(folder=folder, port=port, upstream=upstream, more=more, http2=http2, passes=passes)
    )
    command = [program, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log"), "-g", "daemon off;"]
    with subprocess.Popen(command) as process:
        try:
            ends_s = time.monotonic() + _START_S
            while not _listens(port):
                assert process.poll() is None, (folder / "error.log").read_text()
                assert time.monotonic() < ends_s, "nginx does not listen"
                time.sleep(_POLL_S)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
