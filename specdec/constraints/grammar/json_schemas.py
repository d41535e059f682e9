"""From a JSON schema to the grammar that llguidance compiles."""

from __future__ import annotations

from llguidance import LLMatcher

_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between the tokens of JSON. Unbounded, a model may write nothing else to the end."""


def json_schema_grammar(schema: str) -> str:
    """The grammar of a schema, which is JSON: an object or a boolean. Raises ValueError."""
    if schema.strip() in ("true", "false"):
        schema = '{"not":{}}' if schema.strip() == "false" else "{}"
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITE_SPACE})
