"""A `TokenCheck` verifies the tokens of a run: each sample is trained exactly once, as it was sampled.

check = TokenCheck(load_policy("local:PATH").score)         # without a model, logprobs are not compared
for trace in run.traces():
    check.add(trace)
check.faults, check.difference
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from treetune.chat.tokens import Tokens, TokenSequence
from treetune.core.trace import AgentRecord, Trace

Score = Callable[[list[int]], list[float]]
"""The logprobs of tokens, each after those before it; that of the first is not used."""


class TokenCounts(msgspec.Struct, kw_only=True):
    rollouts: int = 0
    without_tokens: int = 0
    """Rollouts whose model returned no token ids."""
    sequences: int = 0
    calls: int = 0
    """The answers of the model that were delivered: calls of an agent, or turns."""
    trained: int = 0
    side_calls: int = 0
    """Calls that are not the task, such as a title for the session. They are not trained."""
    without_ids: int = 0
    """Answers without token ids. They are not trained."""
    tokens: int = 0
    sampled: int = 0
    realigned: int = 0
    """Prompts that differ from the template's text in order to continue the sampled tokens."""
    rewritten: int = 0
    """How often a sequence begins because the history was rewritten."""
    compactions: int = 0
    sub_agents: int = 0


class TokenCheck:
    def __init__(self, score: Score | None = None) -> None:
        self.counts = TokenCounts()
        self.faults: list[tuple[str, str]] = []
        """The rollouts that are wrong, as `INDEX/NUMBER`, with the fault."""
        self.difference: float | None = None
        """The largest difference between a recorded logprob and that of `score`."""
        self.compared = 0
        """The number of logprobs that were compared."""
        self._score = score

    def add(self, trace: Trace) -> None:
        counts, tokens, agent = self.counts, trace.tokens, trace.agent
        counts.rollouts += 1
        if tokens is None:
            counts.without_tokens += 1
            return
        name = f"{trace.task.idx}/{trace.rollout}"
        self.faults += [(name, fault) for fault in find_faults(tokens, agent)]
        trained = sum(len(sequence.spans) for sequence in tokens.sequences)
        calls = agent.calls if agent is not None else [turn for turn in trace.turns if turn.message is not None]
        lines = agent.lineage if agent is not None else []
        kinds = Counter(line.kind for line in lines)
        side = sum(len(line.calls) for line in lines if line.kind == "side")
        branches = sum(line.origin is not None and line.calls != line.trained for line in lines)
        counts.sequences += len(tokens.sequences)
        counts.calls += len(calls)
        counts.trained += trained
        counts.side_calls += side
        counts.without_ids += max(0, len(calls) - trained - side)
        counts.tokens += sum(len(sequence.ids) for sequence in tokens.sequences)
        counts.sampled += sum(sum(sequence.mask) for sequence in tokens.sequences)
        counts.realigned += sum(sequence.realigned for sequence in tokens.sequences)
        counts.rewritten += sum(sequence.breaks_history for sequence in tokens.sequences) - branches
        counts.compactions += kinds["compaction"]
        counts.sub_agents += kinds["sub-agent"]
        if self._score is not None:
            for sequence in tokens.sequences:
                self._compare(sequence, self._score)

    def _compare(self, sequence: TokenSequence, score: Score) -> None:
        sampled = [at for at, flag in enumerate(sequence.mask) if flag and at]
        if not sampled or not sequence.logprobs:
            return
        fresh = score(sequence.ids[: sampled[-1] + 1])
        self.compared += len(sampled)
        largest = max(abs(fresh[at] - sequence.logprobs[at]) for at in sampled)
        self.difference = max(self.difference or 0.0, largest)


def find_faults(tokens: Tokens, agent: AgentRecord | None = None) -> Iterator[str]:
    """What is wrong with the tokens of a rollout."""
    trained: dict[int, tuple[int, int]] = {}  # the sequence of each call or turn, and where its answer ends there
    for at, sequence in enumerate(tokens.sequences):
        yield from (f"sequence {at}: {fault}" for fault in _faults_of(sequence))
        for turn, _, end in sequence.spans:
            if turn in trained:
                yield f"sequence {at}: call {turn} is also trained in sequence {trained[turn][0]}"
            trained[turn] = at, end
    if agent is not None:
        yield from _faults_of_lineage(tokens.sequences, agent, trained)
    elif list(trained) != list(range(len(trained))):
        yield f"the spans name turns {list(trained)}"


def _faults_of(sequence: TokenSequence) -> Iterator[str]:
    length, end = len(sequence.ids), 0
    for name in ("mask", "logprobs", "versions"):
        if (count := len(getattr(sequence, name))) != length and (count or name == "mask"):
            yield f"{count} {name} for {length} tokens"
            return
    mask = [0] * length
    for span in sequence.spans:
        if not end <= span.first <= span.end <= length:
            yield f"the span of call {span.turn} is from {span.first} to {span.end}"
            return
        end = span.end
        mask[span.first : end] = [1] * (end - span.first)
    if mask != sequence.mask:
        yield "the mask is not 1 exactly where its spans are"
    for flag, logprob in zip(sequence.mask, sequence.logprobs, strict=False):
        if not (-math.inf < logprob < 1e-3 if flag else logprob == 0):
            yield f"a {'sampled' if flag else 'given'} token has the logprob {logprob}"
            return


def _faults_of_lineage(
    sequences: list[TokenSequence], agent: AgentRecord, trained: dict[int, tuple[int, int]]
) -> Iterator[str]:
    lines, others = agent.lineage[: len(sequences)], agent.lineage[len(sequences) :]
    if len(lines) < len(sequences) or any(line.kind != "side" for line in others):
        yield f"{len(sequences)} sequences for the conversations {', '.join(line.kind for line in agent.lineage)}"
        return
    if unknown := {call for line in agent.lineage for call in line.calls} - set(range(len(agent.calls))):
        yield f"there are {len(agent.calls)} calls, and no call {min(unknown)}"
    if sides := {call for line in others for call in line.calls} & trained.keys():
        yield f"call {min(sides)} is a side call, and trained"
    if any(line.kind == "main" for line in lines) and lines[-1].kind != "main":
        yield "the main agent's sequence is not the last"
    for at, (sequence, line) in enumerate(zip(sequences, lines, strict=True)):
        shared = line.calls[: len(line.calls) - len(line.trained)]
        if line.kind == "side":
            yield f"sequence {at}: a side call is trained"
        if [span.turn for span in sequence.spans] != line.trained or shared + line.trained != line.calls:
            yield f"sequence {at}: its spans are not the calls {line.trained}, the last of {line.calls}"
        if sequence.breaks_history != (line.origin is not None):
            yield f"sequence {at}: its history was rewritten after call {line.origin}, and the tokens differ"
        if shared:
            source, end = trained.get(shared[-1], (at, 0))
            if source == at or lines[source].calls[: len(shared)] != shared:
                yield f"sequence {at}: call {shared[-1]} is trained in no sequence that it continues"
            elif sequence.ids[:end] != sequences[source].ids[:end]:
                yield f"sequence {at}: its tokens up to call {shared[-1]} are not those of sequence {source}"
