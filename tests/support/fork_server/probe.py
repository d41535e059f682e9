"""Prints how it was started and exits with CODE: `python -m tests.support.fork_server.probe CODE WORDS...`."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys


def main() -> int:
    names = sorted(name for name in os.environ if name != "PYTEST_CURRENT_TEST")
    seen = {
        "arguments": sys.argv[1:],
        "cwd": os.getcwd(),
        "environment": {name: os.environ[name] for name in names},
        "path": list(dict.fromkeys(sys.path)),
        "input": sys.stdin.read(),
        "files": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
        "leads_session": os.getsid(0) == os.getpid(),
        "is_child_of": os.getppid(),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "cores": sorted(os.sched_getaffinity(0)),
        "main": sys.modules["__main__"].__name__,
    }
    atexit.register(sys.stdout.write, "left\n")
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()
    os.write(int(sys.argv[2]), b"written")
    return int(sys.argv[1])


if __name__ == "__main__":
    sys.exit(main())
