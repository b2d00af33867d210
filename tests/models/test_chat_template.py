"""Chat templates: they render what transformers renders, quote their own errors, and can't leave the sandbox."""

import json
from datetime import datetime
from types import SimpleNamespace

import pytest

from models import chat_template
from models.chat_template import ChatTemplate
from models.errors import TemplateError

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages=HELLO, **options) -> str:
    return ChatTemplate(source).render(messages, **options)


def test_block_lines_leave_no_blanks():
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert render(source) == "hello\n"


def test_loop_controls_and_generation_blocks():
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
    )
    messages = [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "a"), ("user", "b"))]
    assert render(source, messages) == "a"


def test_json_is_as_models_know_it():
    tools = [{"name": "ärger", "parameters": {"b": "<&>'", "a": None}}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "ärger", "parameters": {"b": "<&>\'", "a": null}}]'
    assert render("{{ tools | tojson(indent=2) }}", tools=tools) == json.dumps(tools, indent=2, ensure_ascii=False)


def test_variables_namespaces_and_dates():
    assert render("{{ bos_token }}|{{ thinking }}", bos_token="<s>", thinking=False) == "<s>|False"
    assert (
        render("{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 2 %}{% endfor %}{{ n.i }}") == "2"
    )
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")
    assert render("{{ tools is none }} {{ add_generation_prompt }} {{ nothing_known }}") == "True True "


def test_the_templates_own_message_is_quoted():
    source = (
        "{{ raise_exception('System role not supported') if messages[0].role == 'system' else messages[0].content }}"
    )
    assert render(source) == "hello"
    with pytest.raises(TemplateError, match="refused the conversation: System role not supported"):
        render(source, [{"role": "system", "content": "be nice"}])


@pytest.mark.parametrize(
    "source, words",
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[7].content }}", "refused the conversation"),
        ("{% for m in messages %}", "doesn't parse"),
        ("{{ }", "doesn't parse"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "doesn't parse"),
        ("{{ range(10000000) | list }}", "OverflowError"),
    ],
)
def test_a_template_that_fails_is_a_template_error(source, words):
    with pytest.raises(TemplateError, match=words):
        render(source)


BIG = "{% set x = 'a' * 16000000 %}"
ENDLESS = "{% for i in range(99999) %}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (f"{ENDLESS}{ENDLESS}{{% endfor %}}{{% endfor %}}", "more than 262,144 steps"),
        (f"{ENDLESS}{ENDLESS}{{% if i %}}{{% endif %}}{{% endfor %}}{{% endfor %}}", "more than"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "recursion|more than"),
        ("{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}", "recursion|more than"),
        # Without a loop: each of these is a step of its own.
        (BIG + "{% set y = x | upper %}" * 40, "more than 0.2 seconds"),
        (BIG + "{% set y = x.replace('a', 'b') %}" * 40, "more than 0.2 seconds"),
        (BIG + "{% if 'b' in x %}{% endif %}" * 400, "more than 0.2 seconds"),
        (BIG + "{% set y = x[::-1] %}" * 100, "more than 0.2 seconds"),
        (BIG + "{% set y = x | sort %}", "list of 16,000,000 items, more than the 1,048,576"),
        (BIG + "{% set y = x | map('upper') | list %}", "list of 16,000,000 items"),
        ("{% set x = [1] * 2000000 %}", "list of 2,000,000 items"),
        ("{% set n = namespace(x=[1]) %}" + "{% set n.x = n.x + n.x %}" * 21, "list of 2,097,152 items"),
    ],
)
def test_a_template_that_would_run_for_ever_is_stopped(monkeypatch, source, words):
    monkeypatch.setattr(chat_template, "_MOST_SECONDS", 0.2 if "seconds" in words else 60.0)
    with pytest.raises(TemplateError, match=words):
        render(source)


def test_the_limits_are_a_renderings_own():
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}{{ messages[0].content }}")
    assert [template.render(HELLO) for _ in range(5)] == ["hello"] * 5  # half a million turns in all


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages['__class__'] }}",
    "{{ messages | attr('__class__') }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "{{ lipsum.__globals__['os'].popen('touch MARKER').read() }}",
    "{{ lipsum['__globals__'] }}",
    "{{ raise_exception.__globals__['json'].codecs.open('MARKER', 'w') }}",
    "{{ raise_exception.__globals__.__builtins__.open('MARKER', 'w') }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace(a=1).__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ ('{0.__class__}').format(messages) }}",
    "{{ ('{x.__class__}').format_map({'x': messages}) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "{% set n = namespace() %}{% set n._x = 1 %}",
    "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
    "{{ messages[0].update({'content': 'x'}) }}",
    "{% for m in messages %}{{ m.pop('content') }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ ().__class__.__bases__[0] }}",
    "{{ (1).__class__ }}",
    "{{ messages[0].content.__len__() }}",
    "{% macro m() %}{% endmacro %}{{ m.__class__ }}{{ m.__globals__ }}",
    "{{ [messages] | map(attribute='__class__') | list }}",
    "{{ [messages] | map('attr', '__class__') | list }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_reaching_for_pythons_internals_is_an_error(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(TemplateError):
        render(source, messages)
    assert not (tmp_path / "MARKER").exists()
    assert messages == HELLO


HUGE = [
    "{{ 'a' * 3000000000 }}",
    "{{ 3000000000 * 'a' }}",
    "{{ ([0] * 3000000000) | length }}",
    "{% set n = namespace(s='ab') %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='ab') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(i=3) %}{% for i in range(40) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "{{ 10 ** 10000000000 }}",
    "{{ 'a'.ljust(3000000000) }}",
    "{% set s = 'a' * 100000 %}{% for i in range(1000) %}{{ s }}{% endfor %}",
]


@pytest.mark.parametrize("source", HUGE)
def test_nothing_huge_is_made(source):
    with pytest.raises(TemplateError, match="was stopped: it (makes a text or list of|computes an integer)"):
        render(source)


def test_operators_that_are_watched_still_work():
    source = "{{ 'ab' * 2 }} {{ 3 * 4 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 1.5 * 2 }} {{ [1] + [2] }} {{ 'a' + 'b' }}"
    assert render(source + " {{ 'a' ~ 1 ~ none }} {{ 'a'.ljust(3) }}|") == "abab 12 1024 0.5 3.0 [1, 2] ab a1None a  |"


def test_the_sandbox_says_what_was_reached_for():
    with pytest.raises(TemplateError, match="was stopped: it reaches for '__globals__' of a function"):
        render("{{ raise_exception.__globals__ }}")


@pytest.mark.parametrize(
    "messages, words",
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        (["hello"], "message 0 must be a dict"),
        ([HELLO[0], {"content": "x"}], "message 1 must be a dict with a 'role'"),
        ([{"role": "user", "content": SimpleNamespace()}], "holds a SimpleNamespace"),
    ],
)
def test_malformed_messages(messages, words):
    with pytest.raises(TemplateError, match=words):
        render("{{ messages }}", messages)


def test_content_in_parts_is_text_in_lines():
    parts = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "[1]"}]
    assert render("{{ messages[0].content }}|", [{"role": "user", "content": parts}]) == "Look:\n[1]|"
    assert render("{{ messages[0].content }}|", [{"role": "user", "content": []}]) == "|"
    assert parts[0] == {"type": "text", "text": "Look:"}


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"text": "no type"}, {"type": "text"}, "bare", 7]
)
def test_a_part_that_is_no_text_is_refused(part):
    messages = [HELLO[0], {"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    with pytest.raises(TemplateError, match="message 1 has a part of its content that is no text: only parts like"):
        render("{{ messages }}", messages)


def test_a_template_must_be_a_text():
    with pytest.raises(TemplateError, match="the chat template must be a text, got 7"):
        render(7)


def test_tools_must_be_schemas():
    with pytest.raises(TemplateError, match="describe a tool by its JSON schema"):
        render("{{ tools }}", tools=[print])
