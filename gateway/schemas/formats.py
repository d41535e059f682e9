"""String formats and regular expressions of JSON schemas: which can be enforced, and how."""

from __future__ import annotations

import re
from types import MappingProxyType

_URI_CHAR = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"
_NAME_CHAR = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})"
_AUTHORITY = rf"(?:(?:{_NAME_CHAR}|:)*@)?(?:\[[0-9A-Fa-f:.]+\]|{_NAME_CHAR}*)(?::[0-9]*)?"
_FIRST = f"(?:{_NAME_CHAR}|@)+"
_PATH = rf"(?://{_AUTHORITY}(?:/{_URI_CHAR}*)*|/(?:{_URI_CHAR}+(?:/{_URI_CHAR}*)*)?|{_FIRST}(?:/{_URI_CHAR}*)*|)"
_SCHEME = rf"(?:[A-Za-z][A-Za-z0-9+.\-]*:(?://{_AUTHORITY}(?:/{_URI_CHAR}*)*|/?(?:{_URI_CHAR}+(?:/{_URI_CHAR}*)*)?))"
_END = rf"(?:\?(?:{_URI_CHAR}|[/?])*)?(?:#(?:{_URI_CHAR}|[/?])*)?"
_HEX = "[0-9a-fA-F]"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"

KNOWN_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
"""Formats that the compiler of constraints enforces."""
HINTS = frozenset({"password", "binary", "textarea", "markdown", "html", "float", "double", "decimal"})
"""Formats that allow any text."""
PATTERNS = MappingProxyType(
    {
        "int32": "0|-?[1-9][0-9]{0,9}",
        "int64": "0|-?[1-9][0-9]{0,18}",
        "uint32": "0|[1-9][0-9]{0,9}",
        "uint64": "0|[1-9][0-9]{0,19}",
        "byte": _BASE64,
        "base64": _BASE64,
        "base64url": "[A-Za-z0-9_-]*",
        "jwt": "[A-Za-z0-9_-]+[.][A-Za-z0-9_-]+[.][A-Za-z0-9_-]*",
        "uri-reference": f"(?:{_SCHEME}|{_PATH}){_END}",
        "json-pointer": "(?:/(?:[^~/]|~[01])*)*",
        "relative-json-pointer": "(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)",
        "cuid": "[cC][0-9a-z]{8,}",
        "cuid2": "[0-9a-z]+",
        "ulid": "[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}",
        "nanoid": "[A-Za-z0-9_-]{21}",
        "ksuid": "[A-Za-z0-9]{27}",
        "xid": "[0-9a-vA-V]{20}",
        "e164": "[+][1-9][0-9]{6,14}",
        "guid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
        "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
        **{f"uuid{n}": f"{_HEX}{{8}}-{_HEX}{{4}}-{n}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}" for n in range(1, 9)},
        "cidrv4": f"{_OCTET}(?:[.]{_OCTET}){{3}}/(?:3[0-2]|[12]?[0-9])",
    }
)
"""Regular expressions of whole texts, by format."""
RANGES = MappingProxyType(
    {
        **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
        **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    }
)
"""Least and most value of an integer, by format."""
_BEYOND_REGULAR = re.compile(r"\\[1-9bB]|\\k<|\(\?(?:[=!]|<[=!])")
_SKIPPED = re.compile(r"\\[^1-9bBk]|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def fault_of_pattern(pattern: str) -> str:
    """What makes a regular expression impossible to enforce; empty if nothing is known."""
    bare = _SKIPPED.sub("", pattern)
    if (found := _BEYOND_REGULAR.search(bare)) is None:
        return ""
    return "look-around" if found[0].startswith("(") or found[0] in (r"\b", r"\B") else "a back reference"
