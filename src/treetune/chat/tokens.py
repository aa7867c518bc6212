"""Token sequences for training, recorded exactly as they were sampled.

    tokens = Tokens()
    tokens.add_turn(prompt, completion_ids, logprobs)

A sequence continues as long as each prompt begins with the previous prompt plus the sampled tokens. Any other prompt
starts a new sequence, marked `breaks_history`. `ChatTokens` makes prompts that continue a sequence.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from treetune.chat.call_formats import FORMATS, CallFormat, Schema, check_name, parse_calls
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
    """Whether it continues the sampled tokens with a text slightly different from the template's."""
    text: str | None = None
    """The text from the chat template, if there is text between messages and tokens."""
    shown: int = 0
    """The number of messages in it; the answer is the next one."""
    prefix: str = ""
    """The given beginning of the answer, if any. The prompt ends with it."""


class LastTurn(NamedTuple):
    """The turn that the next prompt continues."""

    prompt: Prompt
    sampled: list[int]
    message: Message | None
    """The message made from the sampled tokens. A conversation with this message continues them."""


class Span(NamedTuple):
    """The tokens that were sampled in a turn of the episode; `first` to before `end` in its sequence."""

    turn: int
    first: int
    end: int


class TokenSequence(msgspec.Struct):
    ids: list[int] = []
    """All tokens, given and sampled."""
    mask: list[int] = []
    """1 for tokens that the policy sampled, 0 for tokens that it was given."""
    logprobs: list[float] = []
    """The policy's log-probability of each sampled token, 0.0 elsewhere; empty if the policy returned none."""
    versions: list[int] = []
    """The weight version for each sampled token, -1 elsewhere or if unknown; empty if all are unknown."""
    breaks_history: bool = False
    """Whether the prompt did not continue the last sequence, because the template rewrote an earlier message."""
    realigned: int = 0
    """How many of its prompts differ from the template's text in order to continue the sampled tokens."""
    spans: list[Span] = []
    """Its turns, which are counted over all sequences of the episode."""


class Tokens(msgspec.Struct, dict=True):
    sequences: list[TokenSequence] = []
    """The sequences. A new one starts when a prompt does not continue the previous tokens; most rollouts have one."""

    def __post_init__(self) -> None:
        self.last: LastTurn | None = None  # only used for the next prompt, not recorded

    def add_turn(
        self,
        prompt: Prompt | Sequence[int],
        completion_ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
        message: Message | None = None,
    ) -> None:
        """Add a prompt (a `Prompt`, or its tokens), the sampled tokens, and the message made from them. Raises
        `PolicyError` if the tokens or logprobs are invalid."""
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
            # The first known version may come late; earlier tokens have none.
            sequence.versions += [-1] * (before + len(given) - len(sequence.versions))
            sequence.versions += versions if versions is not None else [-1] * count
        sequence.realigned += prompt.realigned
        turn = sum(len(each.spans) for each in self.sequences)
        sequence.spans.append(Span(turn, len(sequence.ids) - count, len(sequence.ids)))
        self.last = LastTurn(prompt, sampled, None if message is None else dict(message))

    def _continued_by(self, prompt_ids: list[int], logprobs: bool) -> TokenSequence:
        """The sequence that a prompt continues: the last one, or a new one."""
        if not self.sequences:
            return TokenSequence()
        last = self.sequences[-1]
        continues = prompt_ids[: len(last.ids)] == last.ids
        return last if continues and logprobs == bool(last.logprobs) else TokenSequence(breaks_history=not continues)


Rewrites = Literal["split", "keep"]
"""What to do if a template rewrites an answer in the history, for example drops its reasoning. `split` uses the
template's text and starts a new sequence; `keep` continues the sampled tokens anyway."""

_MOST_TOOLSETS = 64
"""The number of tool sets whose templates a chat caches."""


class ChatTokens:
    """A tokenizer with its chat template. It makes token prompts, and parses sampled tokens into messages."""

    def __init__(
        self,
        tokenizer: Any,
        arguments: Mapping[str, Any] | None = None,
        *,
        rewrites: Rewrites = "split",
        call_format: str | None = None,
    ) -> None:
        """`arguments` are arguments of the template, such as `enable_thinking`. `call_format` is how the model writes
        tool calls, if its template does not show that: a name in `call_formats.FORMATS`."""
        if rewrites not in ("split", "keep"):
            raise UsageError(f"rewrites must be 'split' or 'keep', not {rewrites!r}")
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
        """The same chat, with these tools offered to the model."""
        if not tools:
            return self
        if self._arguments.get("tools"):
            remedy = "leave `tools` out of the chat template's arguments"
            raise UsageError("the task has tools, and the chat template's arguments set `tools` too", remedy=remedy)
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

    @property
    def call_format(self) -> CallFormat | None:
        """How the model writes calls of the tools; None without tools."""
        return FORMATS[self._tools.format] if self._tools is not None else None

    def read(self, prompt: Prompt, sampled: Sequence[int], turn: int = 0, stop: Sequence[str] = ()) -> Message:
        """The message sampled after a prompt, up to the first of the `stop` strings. Tool calls are parsed in the
        template's format, including special tokens, which are removed from all other text."""
        ids = list(sampled)
        said = {"role": "assistant", "content": prompt.prefix + _cut(self.decode(ids, visible=True), stop)}
        if self._tools is None:
            return said
        while ids and ids[-1] in self._special_ids:
            ids.pop()
        text = prompt.prefix + _cut(self.decode(ids), stop)
        # If the prompt has opened a thought, calls come after its end.
        thought = "<think>" if (prompt.text or "").rstrip().endswith("<think>") else ""
        content, calls = parse_calls(thought + text, self._tools.format, self._tools.tools, turn)
        if not calls:
            return said
        for token in self.special_tokens:
            content = content.replace(token, "")
        return {**said, "content": content.removeprefix(thought) or None, "tool_calls": calls}

    def prompt(self, messages: Sequence[Message], *, continues: bool = False) -> Prompt:
        """The prompt of a new conversation. With `continues`, its last message is the beginning of the answer."""
        return self._begin(self._as_taken(messages), continues)

    def _begin(self, messages: Sequence[Message], continues: bool) -> Prompt:
        if self._goes_in_two_steps(messages[:-1] if continues and len(messages) > 1 else messages):
            return self._show(messages, continues)
        return Prompt(self._apply_whole(messages, continues), prefix=_content(messages[-1]) if continues else "")

    def next_prompt(self, messages: Sequence[Message], tokens: Tokens, *, continues: bool = False) -> Prompt:
        """The prompt that continues `tokens`; a new one if there are no tokens yet, or their text is unknown."""
        last, messages = tokens.last, self._as_taken(messages)
        answers = messages[last.prompt.shown :] if last is not None else []
        if last is None or last.prompt.text is None or not answers or answers[0].get("role") != "assistant":
            return self._begin(messages, continues)
        prompt = self._show(messages, continues, encode=False)
        now, given = str(prompt.text), last.prompt.text
        so_far = tokens.sequences[-1]
        sampled = self._decode_apart(last.sampled)
        # Compare with the prompt's recorded text, not with a rendering of the messages, because the two may differ.
        same_text = now.startswith(given) and now.startswith(sampled, len(given))
        if same_text:
            added: str | None = now[len(given) + len(sampled) :]
        else:
            added = self._find_added(messages, now, last, continues)
        if added is None:
            return prompt._replace(ids=self.encode(now))
        ids, exact = self._encode_apart(added)
        return prompt._replace(ids=so_far.ids + ids, realigned=bool(so_far.realigned) or not (same_text and exact))

    def is_end(self, token: int) -> bool:
        """Whether a sampled token ends an answer."""
        return token in self._special_ids

    def render(self, messages: Sequence[Message]) -> str | None:
        """The text of the prompt for a conversation; None if the template refuses it."""
        return self._try_render(self._as_taken(messages))

    def _show(self, messages: Sequence[Message], continues: bool, encode: bool = True) -> Prompt:
        text = self._render(messages, continues)
        return Prompt(
            self.encode(text) if encode else [],
            text=text,
            shown=len(messages) - continues,
            prefix=_content(messages[-1]) if continues else "",
        )

    def _goes_in_two_steps(self, messages: Sequence[Message]) -> bool:
        """Whether the template renders to text before it is tokenized; some tokenizers (mistral-common) do not."""
        if self._in_two_steps is None:
            self._in_two_steps = self.encode(self._render(messages)) == self._apply_whole(messages)
        return self._in_two_steps

    def _find_added(self, messages: Sequence[Message], now: str, last: LastTurn, continues: bool) -> str | None:
        """The text that the template adds after an answer that it renders differently than it was sampled. None if the
        conversation differs, or if the model should see the template's own text."""
        answer, given, prefix = last.prompt.shown, str(last.prompt.text), last.prompt.prefix
        if last.message is None or not is_same(messages[answer], self._as_taken([last.message], is_part=True)[0]):
            return None
        begun = [{"role": "assistant", "content": prefix}] if prefix else []
        if self._try_render([*messages[:answer], *begun], bool(prefix)) != given:
            return None
        opened = given[: len(given) - len(prefix.lstrip())].rstrip()
        # The end token of the answer; empty if the answer was cut off before one.
        ended = last.sampled and last.sampled[-1] in self._special_ids
        end = self.decode(last.sampled[-1:]) if ended else ""
        added = self._find_by_mark(messages, answer, opened, now, end, continues)
        return added if added is not None else self._find_by_end(messages, answer, opened, now, end)

    def _find_by_mark(
        self, messages: Sequence[Message], answer: int, opened: str, now: str, end: str, continues: bool
    ) -> str | None:
        """Find the added text by rendering a mark instead of the answer."""
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
        """Find the added text by the end of the answer, for templates that write tool calls differently from text."""
        upto = self._try_render(messages[: answer + 1], add_generation_prompt=False)
        if upto is None or not end or not upto.startswith(opened) or not now.startswith(upto):
            return None
        shown, found, rest = upto[len(opened) :].rpartition(end)
        return rest + now[len(upto) :] if found and is_shown_by(messages[answer], shown.strip()) else None

    # Messages in the form that the template accepts

    def _as_taken(self, messages: Sequence[Message], is_part: bool = False) -> Sequence[Message]:
        """Convert messages for the template. A part of a conversation (`is_part`) need not list the tools."""
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
                # Most templates render call arguments as JSON, some accept only text.
                as_dicts = [with_arguments(message, dict) for message in messages]
                self._arguments_as = str if self._try_render(as_dicts) is None else dict
            messages = [with_arguments(message, self._arguments_as) for message in messages]
        return messages

    def _shows_parts(self) -> bool:
        """Whether the template renders text parts like plain text. Many templates accept only plain text."""
        text = [{"role": "user", "content": self._mark}]
        parts = [{"role": "user", "content": [{"type": "text", "text": self._mark}]}]
        return self._try_render(parts) == self._render(text)

    def _render(self, messages: Sequence[Message], begun: bool = False, **options: Any) -> str:
        """The text of a conversation. If the last message is still being written (`begun`), the text ends with it."""
        if not begun:
            return str(self._apply(messages, tokenize=False, **options))
        *others, last = messages
        content = _content(last)
        marked = [*others, {**last, "content": content + self._mark}]
        text, *tails = self._render(marked, add_generation_prompt=False).split(self._mark)
        if len(tails) != 1 or not text.endswith(content.lstrip()):
            problem = f"the chat template changes the given beginning of an answer: {content!r:.80}"
            remedy = "leave out the assistant's message at the end of the prompt, or set tokenizer.chat_template"
            raise UsageError(problem, remedy=remedy)
        return text

    def _try_render(self, messages: Sequence[Message], begun: bool = False, **options: Any) -> str | None:
        """Like `_render`, but None if the template refuses the conversation."""
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
                remedy="send messages in an order that it accepts, or set tokenizer.chat_template",
            ) from error

    # Texts and tokens

    def _encode_apart(self, text: str) -> tuple[list[int], bool]:
        """The tokens of a text that follows other text, and whether they are the same as in the text as a whole."""
        ids = self.encode(text)
        if self._decode_apart(ids) == text:
            return ids, True
        # Some tokenizers add a space before the first word of a text, so encode it after another token.
        anchor = self.special_tokens[0]
        first, both = self.encode(anchor), self.encode(anchor + text)
        follows = both[: len(first)] == first
        return (both[len(first) :] if follows else ids), follows

    def _decode_apart(self, ids: list[int]) -> str:
        """The text of tokens that follow other tokens. Some tokenizers drop a leading space."""
        return self.decode(self._special_ids[:1] + ids)[self._anchor_length :]

    # Tokenizers compute these on every access, so they are cached.

    @cached_property
    def _special_ids(self) -> list[int]:
        return list(self._tokenizer.all_special_ids)

    @cached_property
    def special_tokens(self) -> list[str]:
        """The tokens that `read` removes from text."""
        return list(self._tokenizer.all_special_tokens)

    @cached_property
    def _anchor_length(self) -> int:
        return len(self.decode(self._special_ids[:1]))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without further special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: list[int], visible: bool = False) -> str:
        """The text of tokens; special tokens are left out if only `visible` text is wanted."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=visible, clean_up_tokenization_spaces=False))


def _cut(text: str, stop: Sequence[str]) -> str:
    return text[: min((at for each in stop if (at := text.find(each)) >= 0), default=len(text))]


def _content(message: Message) -> str:
    text = text_of(message.get("content"))
    if message.get("role") != "assistant" or text is None:
        raise UsageError("only an assistant message of text can be the beginning of an answer")
    return text
