"""Contents of messages that a chat template can carry into its text but not look at.

    answers = []
    content = Content(answers, Place(0), "Hello")
    "<user>" + content          # a Carried, with a place for the content of message 0
    "</think>" in content       # False, and `answers` says that it was asked
    content.upper()             # raises LookedAt

So what a template makes of such contents, it makes of all contents that give the same answers.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

from treetune.task import Message


class LookedAt(BaseException):
    """Not an Exception, so that no filter of Jinja's takes it for a value that is no number."""


class Place(NamedTuple):
    """Where a message's content goes, and how it was stripped on the way."""

    number: int
    strips: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def of(self, prompt: list[Message]) -> str:
        text: str = prompt[self.number]["content"]
        for method, arguments in self.strips:
            text = getattr(text, method)(*arguments)
        return text


class Answer(NamedTuple):
    """What was asked about a content, and the answer."""

    place: Place
    method: str
    arguments: tuple[str, ...]
    answer: bool

    def same(self, prompt: list[Message]) -> bool:
        """Whether another prompt gives it too."""
        return getattr(self.place.of(prompt), self.method)(*self.arguments) is self.answer


class Carried:
    """Text with places in it. Other text can be put beside it, and that is all.

    What a text has not, this must not have either: a template could ask for it. Names with an underscore it cannot see.
    """

    def __init__(self, pieces: tuple[str | Place, ...]) -> None:
        self._pieces = pieces

    def __add__(self, other: Any) -> Carried:
        return Carried((*self._pieces, *pieces_of(other)))

    def __radd__(self, other: Any) -> Carried:
        return Carried((*pieces_of(other), *self._pieces))


class Content(Carried):
    """The content of one message. It can be stripped, and answers a few questions."""

    def __init__(self, answers: list[Answer], place: Place, text: str) -> None:
        super().__init__((place,))
        self._answers, self._place, self._text = answers, place, text

    def __bool__(self) -> bool:
        return self._ask("__ne__", "")

    def __eq__(self, other: object) -> bool:
        return other is not None and self._ask("__eq__", other)

    def __ne__(self, other: object) -> bool:
        return other is None or self._ask("__ne__", other)

    def __contains__(self, part: object) -> bool:
        return self._ask("__contains__", part)

    def startswith(self, start: object) -> bool:
        return self._ask("startswith", start)

    def endswith(self, end: object) -> bool:
        return self._ask("endswith", end)

    def strip(self, *characters: object) -> Content:
        return self._stripped("strip", characters)

    def lstrip(self, *characters: object) -> Content:
        return self._stripped("lstrip", characters)

    def rstrip(self, *characters: object) -> Content:
        return self._stripped("rstrip", characters)

    def _ask(self, method: str, argument: object) -> bool:
        if type(argument) is not str:
            raise LookedAt
        answer: bool = getattr(self._text, method)(argument)
        self._answers.append(Answer(self._place, method, (argument,), answer))
        return answer

    def _stripped(self, method: str, arguments: tuple[object, ...]) -> Content:
        if not all(argument is None or type(argument) is str for argument in arguments):
            raise LookedAt
        place = Place(self._place.number, (*self._place.strips, (method, arguments)))
        return Content(self._answers, place, getattr(self._text, method)(*arguments))


def pieces_of(value: Any) -> tuple[str | Place, ...]:
    if isinstance(value, Carried):
        return value._pieces
    if type(value) is str:
        return (value,)
    raise LookedAt


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise LookedAt


for _name in (
    "bool bytes complex contains eq float format ge getattr getitem gt hash index int iter le len lt mod mul ne "
    "repr rmod rmul str"
).split():
    setattr(Carried, f"__{_name}__", _refuse)
Content.__hash__ = _refuse  # type: ignore[method-assign]
