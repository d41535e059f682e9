"""The parsers of a model's output, found by the markers that its chat template writes."""

from __future__ import annotations

from dataclasses import dataclass

AUTO = "auto"
_TOOLS = (
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<arg_key>", "<arg_value>", "<tool_call>"), "glm45"),
    (("<seed:tool_call>", "<function="), "seed_oss"),
    (("<|tool_call>call:",), "gemma4"),
    (("<|channel|>", "<|message|>", "functions."), "harmony"),
    (("<tool_call>", "<function=", "<parameter="), "qwen3_coder"),
    (("<｜tool▁calls▁begin｜>",), "deepseek"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_tag|>", "<function="), "none"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
    (("<|python_start|>",), "pythonic"),
    (("<tool_call>", "<invoke name="), "none"),
    (("<tool_call>",), "hermes"),
)
"""Texts that a template must all have, and the tool parser; the first that fits."""
_REASONING = (
    (("<|channel|>", "<|message|>", "analysis"), "harmony"),
    (("<seed:think>",), "seed_oss"),
    (("<|channel>thought",), "gemma4"),
    (("[THINK]",), "mistral"),
    (("</think>",), "think"),
)


@dataclass(frozen=True, slots=True)
class ParserPair:
    """The names of the parsers of a model's output."""

    reasoning: str
    tools: str


def parsers_of_template(template: str, reasoning: str = AUTO, tools: str = AUTO) -> ParserPair:
    """The parsers that fit a chat template, in place of names that are auto. None fits a template without markers."""
    written = template.replace('\\"', '"')
    reasoning = _first(_REASONING, written) if reasoning == AUTO else reasoning
    tools = _first(_TOOLS, written) if tools == AUTO else tools
    if tools == "harmony" and reasoning != "harmony":
        tools = "none"
    if reasoning == "harmony" and tools not in ("harmony", "none"):
        reasoning = "none"
    return ParserPair(reasoning, tools)


def _first(marked: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str:
    return next((name for markers, name in marked if all(marker in template for marker in markers)), "none")
