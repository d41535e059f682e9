"""A clock that may jump decides nothing: wall clocks are read only where a date is shown or compared with one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("coordinator", "draft_service", "gateway", "specdec", "target_service")
WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "localtime"),
    ("time", "gmtime"),
    ("datetime", "now"),
    ("datetime", "today"),
    ("datetime", "utcnow"),
}
REASONS = {
    "coordinator/tenants/api_keys.py": "expires_at of a key is a date",
    "coordinator/text/chat_template.py": "templates write today's date",
    "coordinator/vllm_engine/servicer.py": "start time and now as vLLM tells them, shown only",
    "gateway/parts.py": "`created` of models, shown only",
    "gateway/routes/chat.py": "`created` of an answer, shown only",
    "gateway/routes/completions.py": "`created` of an answer, shown only",
    "gateway/routes/messages.py": "`created` of an answer, shown only",
    "gateway/routes/responses.py": "`created_at` of an answer, shown only",
    "specdec/commands/audit/command.py": "date of a report",
    "specdec/commands/bench.py": "date of a report",
    "specdec/commands/train/pace.py": "hour of the expected end, shown only",
    "specdec/engine/checkpoints/download.py": "age of another process's lock, whose file has a wall clock's time",
    "specdec/commands/tune/command.py": "date of a report",
    "specdec/telemetry/logs/writer.py": "times of lines, shown only",
    "specdec/service/tls_watch.py": "expiry of a certificate is a date",
    "specdec/replica/worker/trace.py": "times of spans, shown only",
}


def wall_clocks(source: str) -> Iterator[str]:
    """The names of wall clocks that a module reads or hands on."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if (owner, node.attr) in WALL_CLOCKS:
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{one.name}" for one in node.names if (node.module, one.name) in WALL_CLOCKS)


def test_wall_clocks_are_read_only_with_a_stated_reason() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.is_symlink() and any(wall_clocks(path.read_text(encoding="utf-8")))
    }
    found = {name for name in found if not any(part.is_symlink() for part in (ROOT / name).parents)}
    assert found == REASONS.keys()


def test_a_wall_clock_is_found_however_it_is_named() -> None:
    for line in ("import time\nx = time.time", "from time import time_ns", "import datetime\ndatetime.datetime.now()"):
        assert list(wall_clocks(line))
    assert not list(wall_clocks("import time\ntime.monotonic()\ntime.perf_counter()"))
