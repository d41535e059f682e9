"""A service may open as many files as its user, and says so when there are none left."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import asyncio, json, os, resource
from structlog.testing import capture_logs
from specdec.service import open_files

async def look():
    watching = asyncio.create_task(open_files.watch())
    await asyncio.sleep(0.05)
    watching.cancel()

open_files._LOOK_S = 0.01
with capture_logs() as lines:
    asyncio.run(look())
    asyncio.run(asyncio.sleep(0))
    few = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files.raise_limit()
    many = resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = asyncio.new_event_loop()
    opened = []
    try:
        while True:
            opened.append(os.dup(1))
    except OSError:
        pass
    loop.run_until_complete(look())
    for file in opened:
        os.close(file)
    loop.run_until_complete(look())
print(json.dumps([few, many, lines]))
"""


def test_the_soft_limit_is_raised_and_files_that_have_run_out_are_one_line_in_a_minute() -> None:
    limited = ["bash", "-c", 'ulimit -Sn 48; ulimit -Hn 64; exec "$@"', "limited", sys.executable, "-c", _PROGRAM]
    done = subprocess.run(limited, capture_output=True, text=True, check=True, timeout=60)
    few, many, lines = json.loads(done.stdout)
    assert (few, many) == ([48, 64], [64, 64])
    (line,) = lines
    assert (line["event"], line["log_level"], line["limit"]) == ("files_exhausted", "error", 64)
