"""Tool calls of each family, found in text that comes in any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.gateway.chat.tool_calls import TOOL_PARSERS, make_tool_parser
from tests.support.chat.parsed import Message, cut, parse, told
from tests.support.cost import lines_run
from tests.support.for_each import for_each

FAMILIES = [name for name in TOOL_PARSERS if name != "none"]
DS = {
    "calls": "<｜tool▁calls▁begin｜>", "end_calls": "<｜tool▁calls▁end｜>", "call": "<｜tool▁call▁begin｜>",
    "end": "<｜tool▁call▁end｜>", "sep": "<｜tool▁sep｜>",
}  # fmt: skip
MARKERS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>",
    "<|python_end|>", *DS.values(), "```json", "```", "<think>", "</think>", "<function=", "</function>", "<parameter=",
    "</parameter>", "<function=f>", "<parameter=a>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>",
    "<|constrain|>", " to=functions.f ", "analysis", "final", "commentary", "<arg_key>a</arg_key>", "<arg_value>",
    "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', "</invoke>",
    '<parameter name="a">', "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="a" string="false">', "</｜DSML｜parameter>", "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_call>",
    "call:f{", "a:", '<|"|>', "<tool_call|>",
]  # fmt: skip


def whole(family: str, text: str) -> Message:
    return parse(make_tool_parser(family), [text])


def write(family: str, calls: list[tuple[str, dict[str, Any]]], form: int) -> str:
    """Calls as a model of the family writes them; the forms of a family count from 0."""
    as_objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    match family, form:
        case (("hermes" | "qwen"), 0):
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in as_objects)
        case (("hermes" | "qwen"), _):
            early = [json.dumps({"arguments": arguments, "name": name}, indent=1) for name, arguments in calls]
            return "".join(f"<tool_call>{text}</tool_call>" for text in early)
        case "llama3_json", 0:
            parameters = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
            return "; ".join(parameters)
        case "llama3_json", 1:
            return "<|python_tag|>" + ";".join(as_objects)
        case "llama3_json", _:
            return f"[{', '.join(as_objects)}]"
        case "mistral", 0:
            return f"[TOOL_CALLS] [{', '.join(as_objects)}]"
        case "mistral", 1:
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
        case "mistral", 2:
            return "".join(f"[TOOL_CALLS]{n}[CALL_ID]a1b2c3d4e[ARGS]{json.dumps(a)}" for n, a in calls)
        case "mistral", _:
            return "".join(f"[TOOL_CALLS]{name}{json.dumps(arguments)}" for name, arguments in calls)
        case "pythonic", 0:
            texts = [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]
            return f"[{', '.join(texts)}]"
        case "pythonic", _:
            texts = [f"{n}({','.join(f'{k} = {json.dumps(v)}' for k, v in a.items())})" for n, a in calls]
            return f"<|python_start|>[{','.join(texts)}]<|python_end|>"
        case "deepseek", 0:
            fenced = [f"{DS['call']}function{DS['sep']}{n}\n```json\n{json.dumps(a)}\n```{DS['end']}" for n, a in calls]
            return DS["calls"] + "\n".join(fenced) + DS["end_calls"]
        case "qwen3_coder", 0:
            return "\n".join(f"<tool_call>\n{in_tags(n, a)}\n</tool_call>" for n, a in calls)
        case "qwen3_coder", 1:
            return "".join(in_tags(n, a) for n, a in calls)
        case "seed_oss", 0:
            return "".join(f"<seed:tool_call>\n{in_tags(n, a)}\n</seed:tool_call>" for n, a in calls)
        case "glm45", 0:
            return "\n".join(f"<tool_call>{n}\n{in_pairs(a, chr(10))}</tool_call>" for n, a in calls)
        case "glm45", 1:
            return "".join(f"<tool_call>{n}{in_pairs(a, '')}</tool_call>" for n, a in calls)
        case "minimax_m2", 0:
            invoked = [f'<invoke name="{n}">\n{in_named(a, "parameter")}</invoke>\n' for n, a in calls]
            return f"<minimax:tool_call>\n{''.join(invoked)}</minimax:tool_call>"
        case "deepseek_v32", _:
            block = "｜DSML｜function_calls" if form == 0 else "｜DSML｜tool_calls"
            tag = "｜DSML｜parameter"
            invoked = [f'<｜DSML｜invoke name="{n}">\n{in_named(a, tag)}</｜DSML｜invoke>\n' for n, a in calls]
            return f"<{block}>\n{''.join(invoked)}</{block}>"
        case "kimi_k2", 0:
            begin, value, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
            told = [f"{begin}functions.{n}:{i}{value}{json.dumps(a)}{end}" for i, (n, a) in enumerate(calls)]
            return f"<|tool_calls_section_begin|>{''.join(told)}<|tool_calls_section_end|>"
        case "gemma4", 0:
            return "".join(f"<|tool_call>call:{n}{in_gemma(a, is_outer=True)}<tool_call|>" for n, a in calls)
        case "harmony", 0:
            head = "<|start|>assistant<|channel|>commentary to=functions."
            parts = [f"{head}{n} <|constrain|>json<|message|>{json.dumps(a)}" for n, a in calls]
            return "<|call|>".join(parts)
        case "harmony", _:
            parts = [f"to=functions.{n}<|channel|>commentary json<|message|>{json.dumps(a)}" for n, a in calls]
            return "<|call|><|start|>assistant ".join(["<|start|>assistant " + parts[0], *parts[1:]]) + "<|call|>"
        case _:
            plain = [f"{DS['call']}{n}{DS['sep']}{json.dumps(a, ensure_ascii=False)}{DS['end']}" for n, a in calls]
            return DS["calls"] + "".join(plain) + DS["end_calls"]


def as_told(family: str, calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """What calls are without schemas: tags without types hold texts."""
    if family not in ("qwen3_coder", "seed_oss", "glm45", "minimax_m2"):
        return calls
    return [(n, {k: v if isinstance(v, str) else json.dumps(v) for k, v in a.items()}) for n, a in calls]


def in_tags(name: str, arguments: dict[str, Any]) -> str:
    """A call of Qwen3-Coder's. Texts stand as they are, so those that have tags in them cannot be written."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<function={name}>\n{parameters}</function>"


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def in_pairs(arguments: dict[str, Any], between: str) -> str:
    """Arguments as GLM writes them."""
    pairs = [(f"<arg_key>{k}</arg_key>", f"<arg_value>{as_text(v)}</arg_value>") for k, v in arguments.items()]
    return "".join(key + between + value + between for key, value in pairs)


def in_named(arguments: dict[str, Any], tag: str) -> str:
    """Arguments as MiniMax and, with types, DeepSeek V3.2 write them."""
    types = {k: f' string="{str(isinstance(v, str)).lower()}"' if "DSML" in tag else "" for k, v in arguments.items()}
    return "".join(f'<{tag} name="{k}"{types[k]}>{as_text(v)}</{tag}>\n' for k, v in arguments.items())


def in_gemma(value: Any, *, is_outer: bool = False) -> str:
    """A value as Gemma 4 writes it; keys of inner objects stand between quotes."""
    quote = '<|"|>'
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        keys = [key if is_outer else f"{quote}{key}{quote}" for key in value]
        return "{" + ",".join(f"{key}:{in_gemma(one)}" for key, one in zip(keys, value.values(), strict=True)) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(in_gemma, value))}]"
    return json.dumps(value)


NUM_FORMS = {
    "hermes": 2,
    "qwen": 1,
    "llama3_json": 3,
    "mistral": 4,
    "pythonic": 2,
    "deepseek": 2,
    "qwen3_coder": 2,
    "harmony": 2,
    "seed_oss": 1,
    "glm45": 2,
    "minimax_m2": 1,
    "deepseek_v32": 2,
    "kimi_k2": 1,
    "gemma4": 1,
}
FORMS = [(family, form) for family, num_forms in NUM_FORMS.items() for form in range(num_forms)]
TALKS_BEFORE = set(NUM_FORMS) - {"llama3_json", "pythonic"}

names = st.sampled_from(["f", "get_weather", "a.b-c"])
scalars = (
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8) | st.sampled_from(["{", '"}', "\\", "</t"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
arguments = st.dictionaries(st.sampled_from(["a", "city", "unit_x"]), values, max_size=3)
some_calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)
pieces_of_models = st.lists(
    st.sampled_from([*MARKERS, "{", "}", "[", "]", "(", ")", ",", ";", ":", '"', "'", "\\", "=", " ", "\n", "name",
                     '"name"', '"arguments"', '"parameters"', '"f"', "f", "function", "1", "é", "{}", "null"])
    | st.sampled_from([marker[:3] for marker in MARKERS]),
    max_size=30,
)  # fmt: skip


@pytest.mark.parametrize(("family", "form"), FORMS)
@given(calls=some_calls)
@settings(max_examples=25, deadline=None)
def test_calls_are_found_with_their_arguments(family: str, form: int, calls: list[tuple[str, dict[str, Any]]]) -> None:
    message = whole(family, write(family, calls, form))
    assert message.decoded == as_told(family, calls)
    assert message.content == ""
    assert len(set(message.ids)) == len(calls)


@pytest.mark.parametrize(("family", "form"), [(f, n) for f, n in FORMS if f in TALKS_BEFORE])
@given(calls=some_calls, before=st.text(st.sampled_from("ab é.<[\n"), max_size=10))
@settings(max_examples=15, deadline=None)
def test_text_before_calls_is_content(
    family: str, form: int, before: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    message = whole(family, f"{before}\n{write(family, calls, form)}")
    assert message.decoded == as_told(family, calls)
    assert message.content == before.rstrip()


@pytest.mark.parametrize("family", FAMILIES)
@given(pieces=pieces_of_models, places=st.lists(st.integers(0, 200), max_size=20))
@settings(max_examples=70, deadline=None)
def test_however_a_text_is_cut_it_is_told_the_same(family: str, pieces: list[str], places: list[int]) -> None:
    text = "".join(pieces)
    expected = told(whole(family, text))
    assert told(parse(make_tool_parser(family), cut(text, places))) == expected
    assert told(parse(make_tool_parser(family), list(text))) == expected


@pytest.mark.parametrize(("family", "form"), FORMS)
@given(calls=some_calls, places=st.lists(st.integers(0, 500), max_size=20), after=st.sampled_from(["", "\n", " more"]))
@settings(max_examples=20, deadline=None)
def test_calls_are_the_same_however_they_are_cut(
    family: str, form: int, calls: list[tuple[str, dict[str, Any]]], places: list[int], after: str
) -> None:
    text = write(family, calls, form) + after
    expected = told(whole(family, text))
    assert told(parse(make_tool_parser(family), cut(text, places))) == expected
    assert told(parse(make_tool_parser(family), list(text))) == expected


@pytest.mark.parametrize("family", TOOL_PARSERS)
@given(text=st.text(max_size=60), places=st.lists(st.integers(0, 60), max_size=8))
@settings(max_examples=40, deadline=None)
def test_text_without_markers_passes_unchanged(family: str, text: str, places: list[int]) -> None:
    text = f"So: {text}"
    assert told(parse(make_tool_parser(family), cut(text, places))) == (text, "", [])


@pytest.mark.parametrize("family", FAMILIES)
@given(calls=some_calls, end=st.integers(0, 400))
@settings(max_examples=30, deadline=None)
def test_a_text_that_ends_early_gives_the_calls_so_far_and_never_more(
    family: str, calls: list[tuple[str, dict[str, Any]]], end: int
) -> None:
    text = write(family, calls, 0)
    full, part = whole(family, text), whole(family, text[:end])
    assert len(part.calls) <= len(full.calls)
    for (name, begun), (full_name, complete) in zip(part.calls, full.calls, strict=False):
        assert name == full_name
        assert complete.startswith(begun)
    if not part.calls:
        assert part.content == text[:end]


@for_each(
    "family, text",
    [
        ("hermes", "<tool_call>\nnot json\n</tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"city": "Paris"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("llama3_json", '{"name": "Alice", "age": 30}'),
        ("llama3_json", '{"name": "Alice"}'),
        ("llama3_json", '{"answer": 42} and so on'),
        ("llama3_json", "[1, 2, 3]"),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] nothing of the kind"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("mistral", "[TOOL_CALLS]f[ARGS]none"),
        ("mistral", "[TOOL_CALLS]" + "x" * 2000),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[see](https://example.org)"),
        ("pythonic", "[f(1, 2)]"),
        ("pythonic", "[f(a=__import__('os'))]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a='\\ud800')]"),
        ("pythonic", "[f(a=" + "(" * 3000 + ")" * 3000 + ")]"),
        ("pythonic", "[f(a='" + "x" * 70_000 + "')]"),
        ("deepseek", f"{DS['calls']}never mind"),
        ("qwen3_coder", "<tool_call>never mind</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=>\n</function>"),
        ("qwen3_coder", "<function=f\n>"),
        ("qwen3_coder", "<function=" + "x" * 300 + ">"),
        ("harmony", "<|channel|>commentary to=functions.f"),
        ("harmony", "<|start|>assistant<|end|>"),
        ("harmony", "<|channel|>" + "x" * 1100),
        ("deepseek", f"{DS['calls']}{DS['call']}function{DS['sep']}f\nno fence"),
        ("glm45", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("glm45", "<tool_call>" + "x" * 300),
        ("glm45", "<tool_call>\n</tool_call>"),
        ("minimax_m2", "<minimax:tool_call>none</minimax:tool_call>"),
        ("minimax_m2", "<invoke name=>"),
        ("deepseek_v32", "<｜DSML｜function_calls>\nnone"),
        ("seed_oss", "<seed:tool_call></seed:tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|>none"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>none"),
        ("kimi_k2", "<|tool_call_begin|>" + "x" * 300),
        ("gemma4", "<|tool_call>none"),
        ("gemma4", "<|tool_call>call:{}"),
        ("gemma4", "<|tool_call>call:" + "x" * 300),
    ],
)
def test_what_turns_out_to_be_no_call_is_content_in_full(family: str, text: str) -> None:
    assert told(whole(family, text)) == (text, "", [])


def test_arguments_that_break_are_told_as_written_to_the_end_of_the_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call> Sorry.'
    assert told(whole("hermes", text)) == (" Sorry.", "", [("f", '{"a": [1}}')])
    text = '[TOOL_CALLS]f[ARGS]{"a": [1}}[TOOL_CALLS]g[ARGS]{}'
    assert whole("mistral", text).calls == [("f", '{"a": [1}}'), ("g", "{}")]
    text = "[f(a=1, b=open('x')), g()]"
    assert told(whole("pythonic", text)) == (" b=open('x')), g()]", "", [("f", '{"a": 1')])


DSML = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">'
TAGS = {
    "qwen3_coder": ("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n", "</function>\n</tool_call>"),
    "seed_oss": ("<seed:tool_call><function=f><parameter=a>", "</parameter>", "</function></seed:tool_call>"),
    "glm45": ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">',
        "</parameter>\n",
        "</invoke>\n</minimax:tool_call>",
    ),
    "deepseek_v32": (DSML, "</｜DSML｜parameter>\n", "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"),
}
OF_VALUES = [*"ab \n<", "END", "x</function>y", "</tool_call> z", "</invoke>z", " <parameter=b> c", "</par"]


@pytest.mark.parametrize("family", TAGS)
@given(pieces=st.lists(st.sampled_from(OF_VALUES), max_size=8), places=st.lists(st.integers(0, 200), max_size=12))
@settings(max_examples=40, deadline=None)
def test_a_value_may_have_its_own_end_tag_in_it(family: str, pieces: list[str], places: list[int]) -> None:
    begin, end, rest = TAGS[family]
    value = "v" + "".join(end.strip() + "w" if piece == "END" else piece for piece in pieces) + "v"
    text = begin + value + end + rest
    message = parse(make_tool_parser(family), cut(text, places))
    assert message.decoded == [("f", {"a": value})]
    assert message.content == ""
    assert told(parse(make_tool_parser(family), list(text))) == told(message)
    ended = parse(make_tool_parser(family), [begin + value + end.rstrip()])
    assert json.loads(ended.calls[0][1] + "}") == {"a": value}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_text_costs_grows_no_faster_than_the_text(family: str) -> None:
    begun = write(family, [("f", {"a": "b", "c": ["d"]})], 0)[:-20]
    for number, marker in enumerate([*MARKERS, " ", "\n", "{", "[", "a"]):
        before = begun if number % 2 else ""

        def cost(num: int, text: str = before + marker * 100) -> int:
            return lines_run(lambda: parse(make_tool_parser(family), [text] * num))

        assert cost(16) < 5 * cost(4), (marker, before)


def test_values_have_the_types_of_their_schemas_in_every_family_of_tags() -> None:
    schemas = {"f": {"properties": {"a": {"type": "integer"}}}}
    for family, (begin, end, rest) in TAGS.items():
        if family != "deepseek_v32":
            assert parse(make_tool_parser(family, schemas), [f"{begin}5{end}{rest}"]).decoded == [("f", {"a": 5})]


def test_ids_of_kimi_are_kept_unless_they_repeat() -> None:
    call = "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    message = whole("kimi_k2", f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>")
    assert message.ids[0] == "functions.f:3"
    assert len(set(message.ids)) == 2


def test_what_gemma_leaves_out_is_written() -> None:
    text = (
        '<|tool_call>call:f{a:New York,b: -1.5 ,c:"x",d:http://e.f/g,e:{k:[01,null,],},f:<|"|>"\\\n<|"|>}<tool_call|>'
    )
    expected = {"a": "New York", "b": -1.5, "c": "x", "d": "http://e.f/g", "e": {"k": ["01", None]}, "f": '"\\\n'}
    assert whole("gemma4", text).decoded == [("f", expected)]


def test_arguments_that_are_a_text_with_json_are_told_without_the_quotes() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"é\\"}"}</tool_call>'
    assert whole("hermes", text).calls == [("f", '{"a": "é"}')]
    assert whole("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>').calls == [("f", "{}")]
    assert whole("hermes", '<tool_call>{"name": "f"}</tool_call>').calls == [("f", "{}")]


def test_content_streams_at_once_and_a_marker_is_held_back_only_while_it_may_become_one() -> None:
    parser = make_tool_parser("hermes")
    assert [delta.content for delta in parser.push("Let me see <tool")] == ["Let me see"]
    assert [delta.content for delta in parser.push("box> now")] == [" <toolbox> now"]


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3_json", "deepseek"])
def test_arguments_stream_as_they_come(family: str) -> None:
    parser = make_tool_parser(family)
    text = write(family, [("f", {"text": "a long story", "n": 1})], 0)
    at = text.index("long")
    message = Message()
    message.add(parser.push(text[:at]))
    assert message.calls == [("f", '{"text": "a ')]
    message.add(parser.push(text[at : at + 2]))
    assert message.calls == [("f", '{"text": "a lo')]


JSON_FORMS = {
    "hermes": '<tool_call>{"name": "f", "arguments": HERE}</tool_call>',
    "llama3_json": '{"name": "f", "parameters": HERE}',
    "mistral": "[TOOL_CALLS]f[ARGS]HERE",
    "deepseek": f"{DS['calls']}{DS['call']}f{DS['sep']}HERE{DS['end']}{DS['end_calls']}",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.f<|message|>HERE<|call|>",
}


@pytest.mark.parametrize("family", JSON_FORMS)
@given(
    parts=st.lists(
        st.sampled_from(["\n", "\t", "\x00", "\\d", "\\n", "\\\\", "\\u00e9", "\\u12", "\\\n", '\\"', "u", "a", "é"])
    ),
    places=st.lists(st.integers(0, 99), max_size=20),
)
@settings(max_examples=30, deadline=None)
def test_strings_of_arguments_are_json_whatever_a_model_writes_in_them(
    family: str, parts: list[str], places: list[int]
) -> None:
    text = JSON_FORMS[family].replace("HERE", f'{{"a": "{"".join(parts)}", "b": 1}}')
    message = parse(make_tool_parser(family), cut(text, places))
    expected = "".join({"\\n": "\n", "\\\\": "\\", "\\u00e9": "é", '\\"': '"'}.get(part, part) for part in parts)
    if "\\u12" not in parts:  # its meaning depends on what follows
        assert message.decoded == [("f", {"a": expected, "b": 1})]
    assert set(message.decoded[0][1]) == {"a", "b"}
    assert told(parse(make_tool_parser(family), list(text))) == told(message)


def test_python_arguments_stream_one_by_one() -> None:
    parser = make_tool_parser("pythonic")
    message = Message()
    message.add(parser.push("[f(a='x, y', b=Tr"))
    assert message.calls == [("f", '{"a": "x, y"')]
    message.add(parser.push("ue)]"))
    assert message.calls == [("f", '{"a": "x, y", "b": true}')]


def test_white_space_beside_calls_is_left_out_and_text_after_them_is_not() -> None:
    text = 'Well.\n\n<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n'
    assert told(whole("hermes", text)) == ("Well.", "", [("f", "{}"), ("g", "{}")])
    assert whole("hermes", text + "Done. ").content == "Well.\nDone. "


def test_an_unknown_parser_is_named() -> None:
    with pytest.raises(ValueError, match="'nosuch' is none of none, hermes"):
        make_tool_parser("nosuch")
