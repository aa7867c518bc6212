"""Prompts as the text that a tokenizer's chat template makes of them, exactly, and far faster than by the template.

    texts = ChatTemplate(tokenizer, {"enable_thinking": False}).render(prompts)

Most templates only carry contents into the text. Which ones do is found out by running the template over contents that
cannot be looked at (`_Carried`): what it makes of them is a `_Form`, a list of fixed texts and places for contents, and
whatever it asked about a content (`'</think>' in content`) is remembered as a condition. A prompt with the same roles
and the same answers has the same form, so its text is put together without the template. Everything else is rendered
by the tokenizer itself.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

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
        self._forms: dict[Any, list[_Form] | None] = {}
        self._watched = _watched(tokenizer, self._arguments)

    def render(self, prompts: Iterable[Prompt]) -> list[str | Exception]:
        """The text of each prompt, or what the template raised."""
        return [self._text(prompt) for prompt in prompts]

    def _text(self, prompt: Prompt) -> str | Exception:
        shape = _shape(prompt) if self._watched is not None else None
        forms = self._forms.get(shape) if shape is not None else None
        if forms:
            for form in forms:
                if (text := form.text(prompt)) is not None:
                    return text
        try:
            text = self._tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False, **self._arguments
            )
        except Exception as error:
            return error
        if shape is not None and (forms is not None or shape not in self._forms) and len(self._forms) < SHAPES:
            self._learn(shape, prompt, text)
        return text

    def _learn(self, shape: Any, prompt: Prompt, text: str) -> None:
        """Find the form of a prompt. None stands for a shape that has none."""
        forms = self._forms.setdefault(shape, [])
        if forms is None or len(forms) >= FORMS:
            return
        form = _form(self._watched, prompt)
        # What the tokenizer itself made of it also tells whether the template got the same variables from us.
        if form is None or form.text(prompt) != text:
            self._forms[shape] = None
        else:
            forms.append(form)


def standard(tokenizer: Any) -> bool:
    """Whether this is one of transformers' tokenizers that renders and then tokenises, by the library's own methods."""
    return all(
        getattr(getattr(tokenizer, name, None), "__module__", "").startswith("transformers.tokenization_utils")
        for name in ("apply_chat_template", "get_chat_template", "__call__")
    )


def _shape(prompt: Prompt) -> Any:
    """What the form of a prompt depends on beside its contents; None where there is more to a message."""
    shape = []
    for message in prompt:
        if len(message) != 2 or type(message.get("content")) is not str or type(role := message.get("role")) is not str:
            return None
        shape.append((role, next(iter(message)) == "role"))
    return tuple(shape)


# Forms


class _Place(NamedTuple):
    """Where a message's content goes, and how it was stripped on the way."""

    number: int
    strips: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def of(self, prompt: Prompt) -> str:
        text: str = prompt[self.number]["content"]
        for name, arguments in self.strips:
            text = getattr(text, name)(*arguments)
        return text


class _Answer(NamedTuple):
    """What the template asked about a content, and what it was told."""

    place: _Place
    method: str
    arguments: tuple[Any, ...]
    answer: bool


class _Form(NamedTuple):
    pieces: list[str | _Place]
    answers: list[_Answer]

    def text(self, prompt: Prompt) -> str | None:
        """The text of a prompt; None where it would have answered otherwise."""
        for place, method, arguments, answer in self.answers:
            if getattr(place.of(prompt), method)(*arguments) is not answer:
                return None
        return "".join([piece if isinstance(piece, str) else piece.of(prompt) for piece in self.pieces])


def _form(watched: _Watched, prompt: Prompt) -> _Form | None:
    answers: list[_Answer] = []
    messages = [
        {key: _Content(answers, _Place(number), value) if key == "content" else value for key, value in message.items()}
        for number, message in enumerate(prompt)
    ]
    try:
        text = watched.template.render(messages=messages, **watched.variables)
    except (_LookedAt, Exception):
        return None
    pieces: list[str | _Place] = []
    for number, piece in enumerate(watched.mark.split(text)):
        if number % 2 == 0:
            pieces.append(piece)
        else:
            pieces.append(watched.places[int(piece)])
    watched.places.clear()
    return _Form([piece for piece in pieces if piece != ""], list(dict.fromkeys(answers)))


# Contents that cannot be looked at


class _LookedAt(BaseException):
    """Not an Exception, so that no filter of Jinja's takes it for a value that is no number."""


class _Carried:
    """Text with contents in it. It can be put beside other text, and nothing else."""

    def __init__(self, pieces: tuple[str | _Place, ...]) -> None:
        self._pieces = pieces

    def __add__(self, other: Any) -> _Carried:
        return _Carried((*self._pieces, *_pieces(other)))

    def __radd__(self, other: Any) -> _Carried:
        return _Carried((*_pieces(other), *self._pieces))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _LookedAt

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __call__ = _refuse
    __str__ = __repr__ = __format__ = __bytes__ = __int__ = __float__ = __index__ = __complex__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse


class _Content(_Carried):
    """The content of one message. It answers some questions, and notes them."""

    def __init__(self, answers: list[_Answer], place: _Place, text: str) -> None:
        super().__init__((place,))
        self._answers, self._place, self._text = answers, place, text

    def _ask(self, method: str, *arguments: Any) -> bool:
        if not all(type(argument) is str for argument in arguments):
            raise _LookedAt
        answer = getattr(self._text, method)(*arguments)
        self._answers.append(_Answer(self._place, method, arguments, answer))
        return bool(answer)

    def _stripped(self, method: str, arguments: tuple[Any, ...]) -> _Content:
        if not all(argument is None or type(argument) is str for argument in arguments):
            raise _LookedAt
        place = _Place(self._place.number, (*self._place.strips, (method, arguments)))
        return _Content(self._answers, place, getattr(self._text, method)(*arguments))

    def __bool__(self) -> bool:
        return self._ask("__ne__", "")

    def __eq__(self, other: object) -> bool:
        return self._ask("__eq__", other)

    def __ne__(self, other: object) -> bool:
        return self._ask("__ne__", other)

    def __contains__(self, part: Any) -> bool:
        return self._ask("__contains__", part)

    def startswith(self, start: Any) -> bool:
        return self._ask("startswith", start)

    def endswith(self, end: Any) -> bool:
        return self._ask("endswith", end)

    def strip(self, *characters: Any) -> _Content:
        return self._stripped("strip", characters)

    def lstrip(self, *characters: Any) -> _Content:
        return self._stripped("lstrip", characters)

    def rstrip(self, *characters: Any) -> _Content:
        return self._stripped("rstrip", characters)

    __hash__ = _Carried._refuse


def _pieces(value: Any) -> tuple[str | _Place, ...]:
    if isinstance(value, _Carried):
        return value._pieces
    if type(value) is str:
        return (value,)
    raise _LookedAt


# The template, watched


class _Watched(NamedTuple):
    """A tokenizer's template in an environment that knows contents that cannot be looked at."""

    template: Any
    variables: dict[str, Any]
    mark: re.Pattern[str]
    places: list[_Place]
    """Those that the running template has put into its text: a mark there is a position here."""


def _watched(tokenizer: Any, arguments: dict[str, Any]) -> _Watched | None:
    """None where the template cannot be followed."""
    if not standard(tokenizer):
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
    secret, places = secrets.token_hex(16), list[_Place]()

    def written(value: Any) -> Any:
        if not isinstance(value, _Carried):
            return value
        text = ""
        for piece in value._pieces:
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
        "trim": lambda value, *given: value.strip(*given) if isinstance(value, _Content) else trim(value, *given),
    }
    environment.tests = {
        **tests,
        # As a text would answer them.
        **{
            name: lambda value, test=tests[name]: isinstance(value, _Carried) or test(value)
            for name in ("string", "iterable", "sequence")
        },
    }
    variables = {"tools": None, "documents": None, "add_generation_prompt": True, **tokenizer.special_tokens_map}
    variables |= {name: value for name, value in arguments.items() if name != "chat_template"}
    return _Watched(environment.from_string(source), variables, re.compile(f"{secret}:([0-9]+):"), places)
