r"""Where a reply gives its answer: how to find it there, how to ask for it, and how to write a right answer.

    place = AnswerFormat(tag="answer")
    place.find("<answer>Paris</answer>")      # [Statement("<answer>", "Paris")]
    place.ask()                               # "Give your final answer as <answer>...</answer>."
    place.fill("Paris")                       # "<answer>Paris</answer>"

In YAML and Python: `answer: boxed`, `answer: {tag: answer}`, `answer: {line: "Answer:", instruct: true}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from treetune.config.structs import convert
from treetune.errors import ConfigError
from treetune.scorers.reading.bounded_search import check_pattern, search
from treetune.scorers.reading.statements import Statement, after, after_hashes, boxed, fenced, tagged


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where to look for the answer. Exactly one form must be set, besides `instruct`."""

    boxed: bool = False
    r"""In `\boxed{...}`."""
    tag: str | None = None
    """In a tag: `answer` for `<answer>...</answer>`."""
    hash: bool = False
    """After `####`, as in GSM8K."""
    line: str | None = None
    """In a line that begins with a mark such as `Answer:`, in any case, or in the line below it."""
    after: str | None = None
    """After a mark, anywhere: the rest of its line, or the next nonempty line."""
    last_line: bool = False
    """In the last nonempty line."""
    first_line: bool = False
    """In the first nonempty line."""
    whole: bool = False
    """The whole reply, without its thinking."""
    json: bool = False
    """The JSON value of the reply, in a code block or by itself."""
    fence: str | None = None
    """In the last code block of a language: `python`."""
    pattern: str | None = None
    """In the first group of a regular expression, or else its whole match."""
    instruct: bool = False
    """Whether the prompt gets a sentence that asks for this form."""

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(FORMS)}")
        if self.tag is not None and not _NAME.fullmatch(self.tag):
            raise ValueError(f"tag is the name without brackets, such as answer; got {self.tag!r:.60}")
        if self.pattern is not None:
            if self.instruct:
                raise ValueError("the prompt cannot ask for a pattern: leave out instruct, and describe the form there")
            check_pattern(self.pattern)

    @classmethod
    def read_config(cls, value: Any, path: str = "", raw: Mapping[str, str] | None = None) -> AnswerFormat:
        """Parse a config value: `boxed`, or `{tag: answer}`."""
        if isinstance(value, AnswerFormat):
            return value
        if isinstance(value, str):
            if value not in _NAMED:
                raise ConfigError(
                    [(path, f"{value!r:.60} is not a form; available: {', '.join(_NAMED)}, or {{tag: ...}}")]
                )
            value = {value: True}
        return convert(value, cls, path=path, raw=raw)

    @property
    def alone(self) -> bool:
        """Whether it cannot be contradicted by other statements in the reply, because they are part of it."""
        return self.whole or self.json or self.fence is not None

    def find(self, text: str) -> list[Statement]:
        """Everything that a text without thinking states in this form."""
        name = str(self)
        return [Statement(name, said, text.rfind(said)) for said in FORMS[self._form].find(text, self._value) if said]

    def ask(self) -> str:
        """The sentence that asks for this form."""
        return FORMS[self._form].asks.format(self._value)

    def fill(self, text: str) -> str:
        """Make a reply that gives a text in this form."""
        return FORMS[self._form].fills.format(text, self._value)

    def fits(self, prompt: str) -> bool:
        """Whether a prompt shows this form, or a text from which a model can know it. A pattern is not checked."""
        low = prompt.casefold()
        if self.pattern is not None:
            return True
        if self.fence is not None:
            return any(word in low for word in (self.fence.casefold(), "code", "```"))
        if self.last_line or self.first_line or self.whole:
            return _ALONE.search(prompt) is not None or f"{self._form[:-5]} line" in low
        mark = {"boxed": "boxed", "tag": f"<{self.tag}>", "hash": "####", "json": "json"}.get(self._form)
        return (mark or str(self.line or self.after).strip()).casefold() in low

    @property
    def spelled(self) -> str:
        """How a config declares it."""
        return self._form if self._form in _NAMED else f"{{{self._form}: {self._value!r}}}"

    @property
    def _form(self) -> str:
        return next(name for name in FORMS if getattr(self, name))

    @property
    def _value(self) -> Any:
        return getattr(self, self._form)

    def __str__(self) -> str:
        return FORMS[self._form].shown.format(self._value)


def asked_form(prompt: str) -> AnswerFormat | None:
    """The form that a prompt asks for, if it shows one."""
    if "####" in prompt:
        return AnswerFormat(hash=True)
    if "\\boxed" in prompt:
        return AnswerFormat(boxed=True)
    if tag := _ASKED_TAG.search(prompt):
        return AnswerFormat(tag=tag[1])
    return AnswerFormat(line="Answer:") if _ASKED_LINE.search(prompt) else None


def _after_line(text: str, mark: str) -> list[str]:
    given = []
    for match in _line_pattern(mark).finditer(text):
        said, _, rest = text[match.end() :].lstrip(" \t").partition("\n")
        given.append(said.strip() or rest.lstrip().partition("\n")[0].strip())
    return [said for said in given if not _line_pattern(mark).match(said)]


@lru_cache(maxsize=1024)
def _line_pattern(mark: str) -> re.Pattern[str]:
    words = re.escape(mark.rstrip(": "))
    lead = r"(?:(?:the|my|our|so|thus|final|correct)\s){0,3}"
    return re.compile(
        rf"(?:^|(?<=[.!?:;]\s))[ \t#>*_`-]{{0,9}}{lead}{words}[*_ ]{{0,4}}:[*_]{{0,4}}"
        if mark.rstrip().endswith(":")
        else rf"^[ \t#>*_`-]{{0,9}}{lead}{words}",
        re.I | re.M,
    )


_ALONE = re.compile(
    r"\b(?:only|just|exactly|nothing else|one word|single word|no other|alone|verbatim|short answer)\b", re.I
)
_NAME = re.compile(r"[A-Za-z][\w-]*")
_NAMED = ("boxed", "hash", "last_line", "first_line", "whole", "json")
_ASKED_TAG = re.compile(r"<([A-Za-z][\w-]{0,40})>[^<]{0,80}</\1>")
_ASKED_LINE = re.compile(r"^\W*answer:|[\"'`“*]answer:", re.I | re.M)
JSON = ("json", "json5", "jsonc", "javascript", "js", "")
"""The languages of code blocks with JSON."""


def _last_block(text: str, languages: Collection[str]) -> list[str]:
    return [block.body for block in fenced(text) if block.language in languages][-1:]


class _Form(NamedTuple):
    shown: str
    fills: str
    asks: str
    find: Callable[[str, Any], list[str]]


FORMS = {
    "boxed": _Form("\\boxed{{}}", "\\boxed{{{0}}}", "Give your final answer in \\boxed{{}}.",
                   lambda text, _: boxed(text)),
    "tag": _Form("<{}>", "<{1}>{0}</{1}>", "Give your final answer as <{0}>...</{0}>.",
                 lambda text, tag: list(tagged(text, tag))),
    "hash": _Form("`####`", "#### {0}", "End your reply with a line that has #### and then your final answer.",
                  lambda text, _: after_hashes(text)),
    "line": _Form("`{}`", "{1} {0}", 'End your reply with a line that begins with "{}" and gives your final answer.',
                  _after_line),
    "after": _Form("`{}`", "{1} {0}", "Write your final answer after {}.",
                   lambda text, mark: after_hashes(text) if mark == "####" else after(text, mark)),
    "last_line": _Form("last line", "{0}", "Write your final answer alone in the last line.",
                       lambda text, _: [text.strip().rpartition("\n")[2].strip()]),
    "first_line": _Form("first line", "{0}", "Write your final answer alone in the first line.",
                        lambda text, _: [text.strip().partition("\n")[0].strip()]),
    "whole": _Form("reply", "{0}", "Reply with your final answer only.", lambda text, _: [text.strip()]),
    "json": _Form("JSON", "{0}", "Reply with one JSON value, in a ```json block.",
                  lambda text, _: _last_block(text, JSON) or [text.strip()]),
    "fence": _Form("```{}", "```{1}\n{0}\n```", "Give your final answer in one ```{} code block.",
                   lambda text, language: _last_block(text, (language.lower(), ""))),
    "pattern": _Form("match of {!r:.60}", "{0}", "", lambda text, pattern: search(pattern, text) or []),
}  # fmt: skip
