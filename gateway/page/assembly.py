"""Puts the page together from its sources: one file without anything to load, and a policy that allows just that."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

SCRIPTS = ("text.js", "stream.js", "run.js", "tree.js", "view.js", "app.js")
"""In the order of their imports: as one script they need none."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Page:
    """The page, and what is sent with it."""

    html: bytes
    etag: str
    policy: str
    """Content-Security-Policy: this script, this style, calls of this origin, and nothing else."""


def assembled() -> Page:
    """The page. Cost: some milliseconds, once."""
    style = _source("page.css")
    script = "".join(_EXPORT.sub("", _IMPORT.sub("", _source(name))) for name in SCRIPTS)
    text = _source("index.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    html = text.encode()
    return Page(html, f'"{hashlib.sha256(html).hexdigest()[:32]}"', _policy(script, style))


def _source(name: str) -> str:
    return files("specdec.gateway.page").joinpath("files", name).read_text("utf-8")


def _policy(script: str, style: str) -> str:
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
