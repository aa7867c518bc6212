"""Prompts as the text that a tokenizer's chat template makes of them, exactly, and far faster than by the template.

    texts = ChatTemplate(tokenizer, {"enable_thinking": False}).render(prompts)

Most templates only carry contents into the text. Which ones do is found out by running the template over contents that
cannot be looked at (`Carried`): what it makes of them is a `_Form`, a list of fixed texts and places for contents, and
whatever it asked about a content (`'</think>' in content`) is remembered as a condition. A prompt with the same roles
and the same answers has the same form, so its text is put together without the template. Everything else is rendered
by the tokenizer itself.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from treetune.rows.carried import Answer, Carried, Content, LookedAt, Place, pieces_of
from treetune.rows.tokenizer import renders_then_tokenises
from treetune.task import Message

Prompt = list[Message]

FORMS = 4
"""Forms of one shape, at most: more would be tried in vain for every prompt."""

SHAPES = 1_000
"""Shapes whose forms are remembered, at most."""


class ChatTemplate:
    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        self._forms: dict[Any, list[_Form]] = {}

    def render(self, prompts: Iterable[Prompt]) -> list[str | Exception]:
        """The text of each prompt, or what the template raised."""
        return [self._text(prompt) for prompt in prompts]

    @cached_property
    def _watched(self) -> _Watched | None:
        return _watched(self._tokenizer, self._arguments)

    def _text(self, prompt: Prompt) -> str | Exception:
        shape = _shape(prompt) if self._watched is not None else None
        for form in self._forms.get(shape, ()):
            if (known := form.text(prompt)) is not None:
                return known
        try:
            text: str = self._tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False, **self._arguments
            )
        except Exception as error:
            return error
        if self._watched is not None and shape is not None and len(self._forms) < SHAPES:
            forms = self._forms.setdefault(shape, [])
            if len(forms) < FORMS:
                forms.append(_form(self._watched, prompt, text))
        return text


def _shape(prompt: Prompt) -> Any:
    """What the form of a prompt depends on beside its contents; None where there is more to a message."""
    shape = []
    for message in prompt:
        if len(message) != 2 or type(message.get("content")) is not str or type(role := message.get("role")) is not str:
            return None
        shape.append((role, next(iter(message)) == "role"))
    return tuple(shape)


# Forms


class _Form(NamedTuple):
    pieces: list[str | Place] | None
    """None where the text is more than contents and what goes around them."""
    answers: list[Answer]

    def text(self, prompt: Prompt) -> str | None:
        """The text of a prompt; None where the template would take another way."""
        if self.pieces is None or not all(answer.same(prompt) for answer in self.answers):
            return None
        return "".join([piece if isinstance(piece, str) else piece.of(prompt) for piece in self.pieces])


def _form(watched: _Watched, prompt: Prompt, text: str) -> _Form:
    """The form of a prompt, whose text is `text`."""
    answers: list[Answer] = []
    messages = [
        {key: Content(answers, Place(number), value) if key == "content" else value for key, value in message.items()}
        for number, message in enumerate(prompt)
    ]
    watched.places.clear()
    try:
        marked = watched.template.render(messages=messages, **watched.variables)
    except (LookedAt, Exception):
        return _Form(None, [])
    # Texts and the numbers of places take turns.
    parts = watched.mark.split(marked)
    pieces = [watched.places[int(part)] if number % 2 else part for number, part in enumerate(parts)]
    form = _Form([piece for piece in pieces if piece != ""], list(dict.fromkeys(answers)))
    # What the tokenizer itself made of it also tells whether the template got the same variables from us.
    return form if form.text(prompt) == text else _Form(None, [])


# The template, watched


class _Watched(NamedTuple):
    """A tokenizer's template in an environment that knows contents that cannot be looked at."""

    template: Any
    variables: dict[str, Any]
    mark: re.Pattern[str]
    places: list[Place]
    """Those that the running template has put into its text: a mark there is a position here."""


def _watched(tokenizer: Any, arguments: dict[str, Any]) -> _Watched | None:
    """None where the template cannot be followed."""
    if not renders_then_tokenises(tokenizer):
        return None
    try:
        from jinja2 import nodes
        from transformers.utils.chat_template_utils import _compile_jinja_template

        source = tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))
        original = _compile_jinja_template(source).environment
        # A block whose output is a value again could look at what was already text.
        allowed = (nodes.Output, nodes.If, nodes.For, nodes.Assign, nodes.ExprStmt, nodes.Continue, nodes.Break)
        for statement in original.parse(source).find_all(nodes.Stmt):
            if not isinstance(statement, allowed) or getattr(statement, "recursive", False):
                return None
    except Exception:
        return None
    secret, places = secrets.token_hex(16), list[Place]()

    def written(value: Any) -> Any:
        if not isinstance(value, Carried):
            return value
        text = ""
        for piece in pieces_of(value):
            if isinstance(piece, str):
                text += piece
            else:
                text += f"{secret}:{len(places)}:"
                places.append(piece)
        return text

    environment = original.overlay(finalize=written)
    trim, tests = original.filters["trim"], original.tests
    environment.filters = {
        **original.filters,
        "trim": lambda value, *given: value.strip(*given) if isinstance(value, Content) else trim(value, *given),
    }
    environment.tests = {
        **tests,
        # As a text would answer them.
        **{
            name: lambda value, test=tests[name]: isinstance(value, Carried) or test(value)
            for name in ("string", "iterable", "sequence")
        },
        "sameas": _same,
    }
    variables = {"tools": None, "documents": None, "add_generation_prompt": True, **tokenizer.special_tokens_map}
    variables |= {name: value for name, value in arguments.items() if name != "chat_template"}
    return _Watched(environment.from_string(source), variables, re.compile(f"{secret}:([0-9]+):"), places)


def _same(value: Any, other: Any) -> bool:
    """Jinja's test `sameas`. Whether two texts are one object, contents cannot tell."""
    if any(isinstance(one, Carried) for one in (value, other)) and isinstance(other, str | Carried):
        raise LookedAt
    return value is other
