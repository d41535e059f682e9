"""Structured logs."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any, TextIO

import structlog

from specdec.telemetry.logs.writer import ThreadedHandler

_FIRST_FIELDS = ("timestamp", "level", "service", "event")
# Clients of model hubs and stores log each URL, and a file's URL is signed, so that its reader may fetch the file.
_TELLS_URLS = ("boto3", "botocore", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3")
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}


def setup_logging(service: str, level: str = "info", log_format: str = "json") -> None:
    """Send all logs, including those of libraries, to standard error: one JSON object a line, or coloured text.

    Every line has time, level, event and service; ids and figures are fields, never parts of the event.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_service(service),
    ]
    if log_format == "json":
        # Without local variables: they hold prompts and keys.
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        final: list[Any] = [
            structlog.processors.ExceptionRenderer(tracebacks),
            _in_reading_order,
            structlog.processors.JSONRenderer(),
        ]
    else:
        final = [
            _without_controls,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_plain_traceback),
        ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
    )
    handler = ThreadedHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _TELLS_URLS:
        logging.getLogger(name).setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.processors.StackInfoRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _in_reading_order(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    return {**{name: event[name] for name in _FIRST_FIELDS if name in event}, **event}


def _without_controls(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
    """Escape control characters: a terminal would obey those of a client's text."""
    return {name: value.translate(_ESCAPES) if isinstance(value, str) else value for name, value in event.items()}


def _plain_traceback(stream: TextIO, exception: Any) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exception)
    stream.write(text.getvalue().translate({**_ESCAPES, ord("\n"): "\n"}))


def _add_service(service: str) -> Any:
    def processor(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event.setdefault("service", service)
        return event

    return processor
