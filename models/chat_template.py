"""Chat templates: Jinja programs that come with a model, and are therefore run as what they are, a stranger's code.

They run in Jinja's immutable sandbox with the names that Hugging Face's templates expect. Reaching for a Python
internal is an error at once, where Jinja's own sandbox would let a bare `{{ x.__class__ }}` print nothing. What they
print, and any text or number that they compute on the way, has a size limit; a rendering ends after so many steps
(turns of loops, calls, filters, comparisons) or so many seconds.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence, Sized
from datetime import datetime
from functools import cached_property, wraps
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from models.errors import TemplateError

_LONGEST = 2**24  # characters of a text, beyond any context window
_MOST_ITEMS = 2**20  # items of a list, and characters of a text that is taken for a list
_WIDEST = 2**12  # bits of an integer
_MOST_STEPS = 2**18  # of a rendering; a real template takes some dozens a message
_MOST_SECONDS = 10.0  # likewise: a step may go through millions of characters
_ITEM_BY_ITEM = (
    *("batch", "groupby", "list", "map", "max", "min", "reject", "rejectattr"),
    *("select", "selectattr", "slice", "sort", "sum", "unique"),
)
_PADDING_METHODS = ("center", "expandtabs", "ljust", "rjust", "zfill")


class ChatTemplate:
    """One template. Compiled at its first use, so that a broken one only hurts those who chat."""

    def __init__(self, source: str, where: str = "the chat template"):
        self.source, self.where = source, where

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the model's prompt text.

        Args:
            messages: dicts with at least a "role"; what else they hold is between caller and template. A "content"
                in parts, [{"type": "text", "text": "..."}, ...], becomes one text, a line a part.
            add_generation_prompt: end with the words that open the assistant's turn.
            tools: JSON schemas of functions that the model may call.
            variables: whatever else the template reads, such as bos_token or enable_thinking.

        Raises:
            TemplateError: the messages are malformed, or hold parts that are no text; or the template doesn't parse,
                calls raise_exception (its message is quoted), fails, reaches for something that the sandbox forbids, or
                makes something huge.
        """
        known = {
            "messages": _checked_messages(messages),
            "tools": None if tools is None else _plain(list(tools), "tools"),
            "documents": None,
            "add_generation_prompt": bool(add_generation_prompt),
        }
        try:
            return self._limited(known | {k: _plain(v, k) for k, v in variables.items()})
        except TemplateError:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise TemplateError(f"{self.where} was stopped: {error}") from None
        except jinja2.TemplateError as error:
            raise TemplateError(f"{self.where} refused the conversation: {error}") from None
        except Exception as error:  # a template can raise anything that an expression can
            raise TemplateError(f"{self.where} failed: {type(error).__name__}: {error}") from None

    def _limited(self, variables: dict[str, Any]) -> str:
        pieces, length = [], 0
        template = self._compiled
        template.environment.work.begin()  # type: ignore[attr-defined]
        for piece in template.generate(variables):
            length += len(piece)
            _check_size(length)
            pieces.append(piece)
        return "".join(pieces)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if not isinstance(self.source, str):
            raise TemplateError(f"{self.where} must be a text, got {self.source!r:.100}")
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{self.where} doesn't parse: {error.message} (line {error.lineno})") from None
        except RecursionError:
            raise TemplateError(f"{self.where} doesn't parse: it's nested too deeply") from None


def _check_size(length: int, most: int = _LONGEST) -> None:
    if length > most:
        raise jinja2.exceptions.SecurityError(
            f"it makes a text or list of {length:,} items, more than the {most:,} that templates may"
        )


def _checked_items(function: Any) -> Any:
    """A filter that goes through what it is given item by item, with a limit to their number."""

    @wraps(function)  # which also keeps Jinja's note whether it wants the context
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, (str, list, tuple, dict)):
                _check_size(len(value), _MOST_ITEMS)
        return function(*args, **kwargs)

    return checked


def _with_step(visit: Any) -> Any:
    """An expression, worth a step: `environment.step` is evaluated before it."""

    def visit_and_count(self: Any, node: Any, frame: jinja2.compiler.Frame) -> None:
        self.write("(environment.step, ")
        visit(self, node, frame)
        self.write(")[1]")

    return visit_and_count


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    visit_Filter = _with_step(jinja2.compiler.CodeGenerator.visit_Filter)
    visit_Test = _with_step(jinja2.compiler.CodeGenerator.visit_Test)
    visit_Compare = _with_step(jinja2.compiler.CodeGenerator.visit_Compare)
    visit_Getitem = _with_step(jinja2.compiler.CodeGenerator.visit_Getitem)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        """`a ~ b`, through the environment: Jinja intercepts the other operators only."""
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Work(threading.local):
    """How far a rendering is; every thread renders for itself."""

    steps = 0
    deadline = 0.0

    def begin(self) -> None:
        self.steps, self.deadline = 0, time.monotonic() + _MOST_SECONDS

    def step(self) -> None:
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise jinja2.exceptions.SecurityError(f"it takes more than {_MOST_STEPS:,} steps")
        if time.monotonic() > self.deadline:
            raise jinja2.exceptions.SecurityError(f"it takes more than {_MOST_SECONDS:g} seconds")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(["*", "**", "+"])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.work = _Work()
        self.filters |= {name: _checked_items(self.filters[name]) for name in _ITEM_BY_ITEM}

    @property
    def step(self) -> None:
        """Counts one more step. A property, because compiled templates read it with less ado than they call."""
        self.work.step()

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Every turn of a loop and every call of a macro begins with a step."""
        template = super()._parse(source, name, filename)
        for node in template.find_all((jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock)):
            step = jinja2.nodes.ExprStmt(jinja2.nodes.EnvironmentAttribute("step"))
            node.body.insert(0, step.set_lineno(node.lineno))  # type: ignore[attr-defined]
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The result, unless it would be huge: that is known before it is computed."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            if (operator == "*" and sum(bits) > _WIDEST) or (operator == "**" and bits[0] * right > _WIDEST):
                raise jinja2.exceptions.SecurityError(f"it computes an integer of more than {_WIDEST} bits")
        elif operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(sized, Sized) and isinstance(count, int):
                    _check_size(len(sized) * count, _LONGEST if isinstance(sized, str) else _MOST_ITEMS)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check_size(len(left) + len(right), _LONGEST if isinstance(left, str) else _MOST_ITEMS)
        return super().call_binop(context, operator, left, right)

    def concatenate(self, parts: Sequence[Any]) -> str:
        self.work.step()
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(__obj, "__self__", None), str) and __obj.__name__ in _PADDING_METHODS:
            _check_size(max((arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)), default=0))
        __self.work.step()
        return super().call(__context, __obj, *args, **kwargs)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise jinja2.exceptions.SecurityError(
            f"it reaches for {attribute!r} of a {type(obj).__name__}, which templates may not touch"
        )


class _Namespace(jinja2.utils.Namespace):
    """`namespace()`, which must not be dressed up as something else by attributes with special names."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"it sets {name!r} on a namespace, which templates may not touch")
        super().__setitem__(name, value)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it's transparent."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Sandbox:
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "namespace": _Namespace,
    }
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as a model has seen it in training: unlike Jinja's own filter, nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise TemplateError(
            f"messages must be a non-empty list like [{{'role': 'user', 'content': '...'}}], got {messages!r:.100}"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f"message {number} must be a dict with a 'role', got {message!r:.100}")
    return [_with_text(message, number) for number, message in enumerate(_plain(list(messages), "messages"))]


def _with_text(message: dict[str, Any], number: int) -> dict[str, Any]:
    """The message with its content in one piece, as every text model's template takes it.

    Few templates look whether it is a list; the others would print it, brackets, braces and all.
    """
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise TemplateError(
                f"message {number} has a part of its content that is no text: only parts like"
                f" {{'type': 'text', 'text': '...'}} are served, got {part!r:.100}"
            )
    return message | {"content": "\n".join(part["text"] for part in parts)}


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of plain data only, so that a template sees no object with methods of its own."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if depth > 64:
        raise TemplateError(f"{where} is nested more than 64 deep")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    raise TemplateError(
        f"{where} holds a {type(value).__name__}; templates take strings, numbers, lists and dicts only"
        + (" (describe a tool by its JSON schema)" if where == "tools" else "")
    )
