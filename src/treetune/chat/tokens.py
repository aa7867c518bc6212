"""Token sequences: what a trainer trains on, kept exactly as it was sampled.

    tokens = Tokens()
    tokens.add_turn(prompt, completion_ids, logprobs)

A sequence continues as long as each prompt begins with the previous prompt plus the sampled tokens. Any other prompt
begins a new sequence, marked `breaks_history`. `ChatTokens` makes prompts that continue.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from treetune.chat.call_formats import Schema, check_name, parse_calls
from treetune.chat.calls import is_same, is_shown_by, with_arguments
from treetune.chat.images import has_images
from treetune.chat.message import Message, flatten_content, text_of
from treetune.chat.sampled_tokens import check_ids, check_logprobs
from treetune.chat.tool_template import ToolTemplate
from treetune.errors import PolicyError, UsageError, format_error

_GIVEN = "token of the prompt, number"
NO_IMAGES = "the prompt has images, and a tokenizer reads only text"


class Prompt(NamedTuple):
    """The input of a model."""

    ids: list[int]
    realigned: bool = False
    """It continues the sampled tokens, and its text differs a little from the template's own."""
    text: str | None = None
    """The chat template's own text of it, where there is one between messages and tokens."""
    shown: int = 0
    """How many messages it holds: the answer is the next one."""
    prefix: str = ""
    """How the answer begins, where that was written before it was sampled; the prompt ends with it."""


class LastTurn(NamedTuple):
    """What the next prompt continues."""

    prompt: Prompt
    sampled: list[int]
    message: Message | None
    """The message that was made of them. A conversation that has it continues them."""


class TokenSequence(msgspec.Struct):
    ids: list[int] = []
    """The tokens, those given and those sampled."""
    mask: list[int] = []
    """1 where the token was sampled by the policy, 0 where it was given to it."""
    logprobs: list[float] = []
    """The policy's log-probability of each sampled token, 0.0 elsewhere; empty where the policy gave none."""
    versions: list[int] = []
    """The version of the weights that sampled each token, -1 elsewhere and where it is unknown; empty where all are."""
    breaks_history: bool = False
    """The prompt did not continue the sequence before: the chat template rewrote an earlier message."""
    realigned: int = 0
    """How many of its prompts differ from the template's own text in order to continue the sampled tokens."""


class Tokens(msgspec.Struct, dict=True):
    sequences: list[TokenSequence] = []
    """One for each stretch in which every prompt continues the tokens before; most rollouts have one."""

    def __post_init__(self) -> None:
        self.last: LastTurn | None = None  # only for the next prompt: no part of the record

    def add_turn(
        self,
        prompt: Prompt | Sequence[int],
        completion_ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
        message: Message | None = None,
    ) -> None:
        """Adds a prompt (a `Prompt`, or its tokens), the sampled tokens, and the message made of them. Raises
        `PolicyError` where tokens or logprobs cannot be right."""
        if not isinstance(prompt, Prompt):
            prompt = Prompt(prompt if isinstance(prompt, list) else check_ids(prompt, _GIVEN))
        prompt_ids = prompt.ids
        sampled = check_ids(completion_ids, "sampled token")
        logprobs = None if logprobs is None else check_logprobs(logprobs)
        count = len(sampled)
        for name, values in (("logprobs", logprobs), ("versions", versions)):
            if values is not None and len(values) != count:
                raise PolicyError(f"{len(values)} {name} for {count} sampled tokens")
        sequence = self._continued_by(prompt_ids, logprobs is not None)
        before = len(sequence.ids)
        given = check_ids(prompt_ids[before:], _GIVEN)
        if not self.sequences or sequence is not self.sequences[-1]:
            self.sequences.append(sequence)
        sequence.ids += given
        sequence.ids += sampled
        sequence.mask += [0] * len(given)
        sequence.mask += [1] * count
        if logprobs is not None:
            sequence.logprobs += [0.0] * len(given)
            sequence.logprobs += logprobs
        if versions is not None or sequence.versions:
            # The first known version may come late: the tokens before it have none.
            sequence.versions += [-1] * (before + len(given) - len(sequence.versions))
            sequence.versions += versions if versions is not None else [-1] * count
        sequence.realigned += prompt.realigned
        self.last = LastTurn(prompt, sampled, None if message is None else dict(message))

    def _continued_by(self, prompt_ids: list[int], logprobs: bool) -> TokenSequence:
        """The sequence that a prompt continues: the last one, or a new one."""
        if not self.sequences:
            return TokenSequence()
        last = self.sequences[-1]
        continues = prompt_ids[: len(last.ids)] == last.ids
        return last if continues and logprobs == bool(last.logprobs) else TokenSequence(breaks_history=not continues)


Rewrites = Literal["split", "keep"]
"""What to do where a template rewrites an answer in the history, such as dropping its reasoning: `split` gives the
model the template's own text, in a sequence of its own; `keep` continues the sampled tokens nevertheless."""

_MOST_TOOLSETS = 64
"""For how many sets of tools a chat remembers how its template takes them."""


class ChatTokens:
    """A tokenizer with its chat template: makes prompts in tokens, and reads sampled tokens as messages."""

    def __init__(
        self,
        tokenizer: Any,
        arguments: Mapping[str, Any] | None = None,
        *,
        rewrites: Rewrites = "split",
        call_format: str | None = None,
    ) -> None:
        """`arguments` are the template's own, such as `enable_thinking`. `call_format` is how the model writes calls of
        tools, where its template does not show that: a name in `call_formats.FORMATS`."""
        if rewrites not in ("split", "keep"):
            raise UsageError(f"rewrites is 'split' or 'keep', not {rewrites!r}")
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        self._rewrites = rewrites
        self._in_two_steps: bool | None = None
        self._takes_parts: bool | None = None
        self._arguments_as: type | None = None
        self._mark = f"answer{secrets.token_hex(12)}"
        self._call_format = check_name(call_format)
        self._tools: ToolTemplate | None = None
        self._by_tools: dict[str, ChatTokens] = {}

    def with_tools(self, tools: Sequence[Schema]) -> ChatTokens:
        """The same chat, in which the model is shown these tools and may call them."""
        if not tools:
            return self
        if self._arguments.get("tools"):
            remedy = "leave `tools` out of the chat template's arguments"
            raise UsageError("the task has tools, and so has the chat template by its arguments", remedy=remedy)
        key = json.dumps(list(tools))
        if key not in self._by_tools:
            if len(self._by_tools) >= _MOST_TOOLSETS:
                self._by_tools.clear()
            chat = ChatTokens(self._tokenizer, self._arguments, rewrites=self._rewrites, call_format=self._call_format)
            chat._tools = ToolTemplate.of(self._tokenizer, tools, chat._try_render, self._call_format)
            chat._arguments_as = chat._tools.arguments if chat._tools.most_calls else None
            if chat._tools.shows_tools:
                chat._arguments["tools"] = list(tools)
            self._by_tools[key] = chat
        return self._by_tools[key]

    def read(self, prompt: Prompt, sampled: Sequence[int], turn: int = 0, stop: Sequence[str] = ()) -> Message:
        """The message that was sampled to a prompt, up to the first of the `stop` strings. Calls of tools are read by
        the template's own convention, special tokens and all; any other text has none of these."""
        ids = list(sampled)
        said = {"role": "assistant", "content": prompt.prefix + _cut(self._decode(ids, visible=True), stop)}
        if self._tools is None:
            return said
        while ids and ids[-1] in self._special_ids:
            ids.pop()
        text = prompt.prefix + _cut(self._decode(ids), stop)
        # Where the prompt has begun a thought, calls come after the end of it.
        thought = "<think>" if (prompt.text or "").rstrip().endswith("<think>") else ""
        content, calls = parse_calls(thought + text, self._tools.format, self._tools.tools, turn)
        if not calls:
            return said
        for token in self._special_tokens:
            content = content.replace(token, "")
        return {**said, "content": content.removeprefix(thought) or None, "tool_calls": calls}

    def prompt(self, messages: Sequence[Message], *, continues: bool = False) -> Prompt:
        """A conversation that begins. With `continues` its last message is the beginning of the answer."""
        return self._begin(self._as_taken(messages), continues)

    def _begin(self, messages: Sequence[Message], continues: bool) -> Prompt:
        if self._goes_in_two_steps(messages[:-1] if continues and len(messages) > 1 else messages):
            return self._show(messages, continues)
        return Prompt(self._apply_whole(messages, continues), prefix=_content(messages[-1]) if continues else "")

    def next_prompt(self, messages: Sequence[Message], tokens: Tokens, *, continues: bool = False) -> Prompt:
        """A conversation that goes on from `tokens`; one that begins where there are none yet, or no text of them."""
        last, messages = tokens.last, self._as_taken(messages)
        answers = messages[last.prompt.shown :] if last is not None else []
        if last is None or last.prompt.text is None or not answers or answers[0].get("role") != "assistant":
            return self._begin(messages, continues)
        prompt = self._show(messages, continues, encode=False)
        now, given = str(prompt.text), last.prompt.text
        so_far = tokens.sequences[-1]
        sampled = self._decode_apart(last.sampled)
        # The text of what was given, and not a rendering of the messages that are said to have been: they may differ.
        same_text = now.startswith(given) and now.startswith(sampled, len(given))
        if same_text:
            added: str | None = now[len(given) + len(sampled) :]
        else:
            added = self._find_added(messages, now, last, continues)
        if added is None:
            return prompt._replace(ids=self._encode(now))
        ids, exact = self._encode_apart(added)
        return prompt._replace(ids=so_far.ids + ids, realigned=bool(so_far.realigned) or not (same_text and exact))

    def _show(self, messages: Sequence[Message], continues: bool, encode: bool = True) -> Prompt:
        text = self._render(messages, continues)
        return Prompt(
            self._encode(text) if encode else [],
            text=text,
            shown=len(messages) - continues,
            prefix=_content(messages[-1]) if continues else "",
        )

    def _goes_in_two_steps(self, messages: Sequence[Message]) -> bool:
        """Whether there is a text between messages and tokens: some tokenizers (mistral-common) have none."""
        if self._in_two_steps is None:
            self._in_two_steps = self._encode(self._render(messages)) == self._apply_whole(messages)
        return self._in_two_steps

    def _find_added(self, messages: Sequence[Message], now: str, last: LastTurn, continues: bool) -> str | None:
        """What the template adds after an answer that it writes otherwise than it was sampled. None where the
        conversation is another one, or the model shall see the template's own text."""
        answer, given, prefix = last.prompt.shown, str(last.prompt.text), last.prompt.prefix
        if last.message is None or not is_same(messages[answer], self._as_taken([last.message], is_part=True)[0]):
            return None
        begun = [{"role": "assistant", "content": prefix}] if prefix else []
        if self._try_render([*messages[:answer], *begun], bool(prefix)) != given:
            return None
        opened = given[: len(given) - len(prefix.lstrip())].rstrip()
        # The end token of the answer; nothing where it was cut off before one.
        ended = last.sampled and last.sampled[-1] in self._special_ids
        end = self._decode(last.sampled[-1:]) if ended else ""
        added = self._find_by_mark(messages, answer, opened, now, end, continues)
        return added if added is not None else self._find_by_end(messages, answer, opened, now, end)

    def _find_by_mark(
        self, messages: Sequence[Message], answer: int, opened: str, now: str, end: str, continues: bool
    ) -> str | None:
        """With a mark in the answer's place."""
        marked = [*messages[:answer], {"role": "assistant", "content": self._mark}, *messages[answer + 1 :]]
        head, *tails = (self._try_render(marked, continues) or "").split(self._mark)
        if len(tails) != 1:
            return None
        tail = tails[0]
        if self._rewrites == "split":
            if head.rstrip() != opened or not (now.startswith(head) and now.endswith(tail)):
                return None
            if not is_shown_by(messages[answer], now[len(head) : len(now) - len(tail)].strip()):
                return None
        return tail.lstrip()[len(end) :] if end and tail.lstrip().startswith(end) else tail

    def _find_by_end(self, messages: Sequence[Message], answer: int, opened: str, now: str, end: str) -> str | None:
        """By the end of the answer: where a template writes a tool call otherwise than any text."""
        upto = self._try_render(messages[: answer + 1], add_generation_prompt=False)
        if upto is None or not end or not upto.startswith(opened) or not now.startswith(upto):
            return None
        shown, found, rest = upto[len(opened) :].rpartition(end)
        return rest + now[len(upto) :] if found and is_shown_by(messages[answer], shown.strip()) else None

    # Messages, as the template takes them

    def _as_taken(self, messages: Sequence[Message], is_part: bool = False) -> Sequence[Message]:
        """`is_part`: these are some messages of a conversation, which need not list the tools."""
        if has_images(messages):
            raise UsageError(
                NO_IMAGES, remedy="use a model behind an endpoint, or a trainer whose processor sees images"
            )
        if self._tools is not None:
            messages = self._tools.take(messages, is_part)
        if all(isinstance(message.get("content"), str) and "tool_calls" not in message for message in messages):
            return messages
        if any(isinstance(message.get("content"), list) for message in messages) and self._takes_parts is None:
            self._takes_parts = self._shows_parts()
        if not self._takes_parts:
            messages = [flatten_content(message) for message in messages]
        if any(message.get("tool_calls") for message in messages):
            if self._arguments_as is None:
                # Most templates write the arguments of a call as JSON, some only know text.
                as_dicts = [with_arguments(message, dict) for message in messages]
                self._arguments_as = str if self._try_render(as_dicts) is None else dict
            messages = [with_arguments(message, self._arguments_as) for message in messages]
        return messages

    def _shows_parts(self) -> bool:
        """Whether the template writes parts of text as it writes the text itself; most know only texts."""
        text = [{"role": "user", "content": self._mark}]
        parts = [{"role": "user", "content": [{"type": "text", "text": self._mark}]}]
        return self._try_render(parts) == self._render(text)

    def _render(self, messages: Sequence[Message], begun: bool = False, **options: Any) -> str:
        """The text of a conversation; one whose last message is still being written ends with that message."""
        if not begun:
            return str(self._apply(messages, tokenize=False, **options))
        *others, last = messages
        content = _content(last)
        marked = [*others, {**last, "content": content + self._mark}]
        text, *tails = self._render(marked, add_generation_prompt=False).split(self._mark)
        if len(tails) != 1 or not text.endswith(content.lstrip()):
            problem = f"the chat template does not write the beginning of an answer as it is: {content!r:.80}"
            remedy = "leave out the assistant's message at the end of the prompt, or set tokenizer.chat_template"
            raise UsageError(problem, remedy=remedy)
        return text

    def _try_render(self, messages: Sequence[Message], begun: bool = False, **options: Any) -> str | None:
        """The same; None where the template refuses it."""
        with suppress(UsageError):
            return self._render(messages, begun, **options)
        return None

    def _apply_whole(self, messages: Sequence[Message], continues: bool = False) -> list[int]:
        options = {"add_generation_prompt": False, "continue_final_message": True} if continues else {}
        return list(map(int, self._apply(messages, tokenize=True, return_dict=False, **options)))

    def _apply(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), **{"add_generation_prompt": True, **options}, **self._arguments
            )
        except Exception as error:
            raise UsageError(
                f"the chat template refuses the conversation: {format_error(error)}",
                remedy="send messages in an order that it takes, or set tokenizer.chat_template",
            ) from error

    # Texts and tokens

    def _encode_apart(self, text: str) -> tuple[list[int], bool]:
        """The tokens of a text that follows others, and whether they are what they would be there."""
        ids = self._encode(text)
        if self._decode_apart(ids) == text:
            return ids, True
        # Some tokenizers put a space before the first word of a text: so this one must not be the first.
        anchor = self._special_tokens[0]
        first, both = self._encode(anchor), self._encode(anchor + text)
        follows = both[: len(first)] == first
        return (both[len(first) :] if follows else ids), follows

    def _decode_apart(self, ids: list[int]) -> str:
        """The text of tokens that follow others; some tokenizers drop the space that a text begins with."""
        return self._decode(self._special_ids[:1] + ids)[self._anchor_length :]

    # A tokenizer computes these for each access.

    @cached_property
    def _special_ids(self) -> list[int]:
        return list(self._tokenizer.all_special_ids)

    @cached_property
    def _special_tokens(self) -> list[str]:
        return list(self._tokenizer.all_special_tokens)

    @cached_property
    def _anchor_length(self) -> int:
        return len(self._decode(self._special_ids[:1]))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _decode(self, ids: list[int], visible: bool = False) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=visible, clean_up_tokenization_spaces=False))


def _cut(text: str, stop: Sequence[str]) -> str:
    return text[: min((at for each in stop if (at := text.find(each)) >= 0), default=len(text))]


def _content(message: Message) -> str:
    text = text_of(message.get("content"))
    if message.get("role") != "assistant" or text is None:
        raise UsageError("only a text of the assistant's can be the beginning of an answer")
    return text
