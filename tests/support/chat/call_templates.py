"""Chat templates, written for tests, that accept only one form of calls, of their results or of reasoning."""

from __future__ import annotations

_LOOP = """{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.role == 'assistant' %}BODY{% else %}
{{ m.content }}{% endif %}{% endfor %}"""
_CALLS = "{% for c in m.tool_calls or [] %}{{ '<' + c.function.name + ' ' }}ARGUMENTS{{ '>' }}{% endfor %}"
_JSON = "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"


def _template(body: str, arguments: str = _JSON) -> str:
    return _LOOP.replace("BODY", body.replace("CALLS", _CALLS)).replace("ARGUMENTS", arguments)


EMPTY_ONLY = _template("{{ m.content + '' }}CALLS")
NULL_ONLY = _template("{% if m['content'] is none %}CALLS{% else %}{{ m['content'] + '' }}{% endif %}")
ABSENT_ONLY = _template(
    "{% if 'content' in m %}{% if not m.content %}{{ raise_exception('nothing is said') }}{% endif %}{{ m.content }}"
    "{% endif %}CALLS"
)
WRITES_NULL = _template("{{ m.content if m.content is defined else '' }}CALLS")
AS_JSON = _template("{{ m.content if m.content is string else m.content | tojson }}CALLS")
ANY = _template("{{ m.content or '' }}CALLS")
TEXT_ARGUMENTS = _template("{{ m.content or '' }}CALLS", "{{ '' + c.function.arguments }}")
PRINTED_ARGUMENTS = _template("{{ m.content or '' }}CALLS", "{{ c.function.arguments }}")
DUMPED_ARGUMENTS = _template("{{ m.content or '' }}CALLS", "{{ c.function.arguments | tojson }}")
WALKED_ARGUMENTS = _template(
    "{{ m.content or '' }}CALLS", "{% for k, v in c.function.arguments.items() %}{{ k ~ '=' ~ v }}{% endfor %}"
)
WALKED_OR_TEXT_ARGUMENTS = _template(
    "{{ m.content or '' }}CALLS",
    "{% if c.function.arguments is mapping %}"
    "{% for k, v in c.function.arguments | items %}{{ k ~ '=' ~ v }}{% endfor %}"
    "{% else %}{{ c.function.arguments }}{% endif %}",
)
NULL_AND_TEXT_ARGUMENTS = _template(
    "{% if m['content'] is none %}CALLS{% else %}{{ m['content'] + '' }}{% endif %}", "{{ '' + c.function.arguments }}"
)
PARTS_AND_CALLS = """{% for m in messages %}{{ '[' + m.role + ']' }}{% for p in m.content %}{{ p.text }}{% endfor %}
{% for c in m.tool_calls or [] %}{{ '<' + c.function.name + ' ' }}{{ c.function.arguments | tojson }}
{{- '>' }}{% endfor %}{% endfor %}"""
NAMED_RESULTS = """{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.role == 'tool' %}
{{ m.name + ': ' }}{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}{{ '<' + c.function.name + '>' }}{% endfor %}{% endfor %}"""
ONE_THOUGHT = """{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.tool_calls and m.content and m.thinking %}
{{ raise_exception('content or thinking, not both') }}{% endif %}
{{ m.thinking or '' }}{{ m.content or '' }}{% endfor %}"""
OTHER_REASONING = """{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.reasoning %}
{{ '{' + m.reasoning + '}' }}{% endif %}{{ m.content or '' }}{% endfor %}"""
