"""`treetune gateway verify`: every sample of a run is trained exactly once, or the run is refused."""

from __future__ import annotations

import pytest

from treetune.chat.tokens import Span, Tokens, TokenSequence
from treetune.core.task import Task
from treetune.core.trace import AgentRecord, Lineage, Trace, Turn, encode_trace
from treetune.runs.token_check import TokenCheck, find_faults

ANSWER = {"role": "assistant", "content": "ok"}


def sequence(ids, *spans, breaks=False):
    """Each token's logprob is minus its id."""
    mask = [int(any(first <= at < end for _, first, end in spans)) for at in range(len(ids))]
    logprobs = [-float(token) * flag for token, flag in zip(ids, mask, strict=True)]
    return TokenSequence(ids, mask, logprobs, breaks_history=breaks, spans=[Span(*span) for span in spans])


def agent_trace():
    """Calls 0 and 3 are the main agent's, 1 a sub-agent's, 4 a branch of the main agent's, 5 its edited history, 2 a
    title, 6 an answer without ids."""
    branch = sequence([1, 2, 3, 9, 8], (0, 1, 3), (4, 4, 5))
    edited = sequence([7, 6], (5, 1, 2), breaks=True)
    sub = sequence([5, 4], (1, 1, 2))
    main = sequence([1, 2, 3, 4, 5, 6], (3, 4, 6))
    lines = [
        Lineage(kind="main", calls=[0, 4], trained=[0, 4]),
        Lineage(kind="main", calls=[5], trained=[5], origin=0),
        Lineage(kind="sub-agent", calls=[1], trained=[1]),
        Lineage(kind="main", calls=[0, 3], trained=[3]),
        Lineage(kind="side", calls=[2], trained=[2]),
    ]
    record = AgentRecord(name="mine", calls=[Turn(message=ANSWER) for _ in range(7)], lineage=lines)
    return Trace(task=Task(idx=4), uid="u" * 12, agent=record, tokens=Tokens([branch, edited, sub, main]))


def policy_trace():
    one, two = sequence([1, 2, 3, 4], (0, 1, 2), (1, 3, 4)), sequence([9, 8], (2, 1, 2), breaks=True)
    turns = [Turn(message=ANSWER) for _ in range(3)]
    return Trace(task=Task(idx=5), uid="v" * 12, turns=turns, tokens=Tokens([one, two]))


def test_exact_tokens_have_no_fault_and_are_counted():
    check = TokenCheck(lambda ids: [-float(token) for token in ids])
    for trace in (agent_trace(), policy_trace(), Trace(task=Task(), uid="w")):
        check.add(trace)
    assert check.faults == []
    counts = check.counts
    assert (counts.rollouts, counts.without_tokens, counts.sequences) == (3, 1, 6)
    assert (counts.calls, counts.trained, counts.side_calls, counts.without_ids) == (10, 8, 1, 1)
    assert (counts.tokens, counts.sampled, counts.rewritten, counts.sub_agents) == (21, 10, 2, 1)
    assert (check.compared, check.difference) == (10, 0.0)


def change(path, value):
    """Set an attribute or an item of the trace: `tokens.sequences.3.mask.0`."""

    def apply(trace):
        *way, last = path.split(".")
        place = trace
        for name in way:
            place = place[int(name)] if name.isdigit() else getattr(place, name)
        if last.isdigit():
            place[int(last)] = value
        else:
            setattr(place, last, value)

    return apply


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("tokens.sequences.3.mask.2", 1, "sequence 3: the mask is not 1"),
        ("tokens.sequences.0.mask.4", 0, "sequence 0: the mask is not 1"),
        ("tokens.sequences.0.mask", [0], "sequence 0: 1 mask for 5 tokens"),
        ("tokens.sequences.0.logprobs", [0.0], "sequence 0: 1 logprobs for 5 tokens"),
        ("tokens.sequences.0.versions", [1], "sequence 0: 1 versions for 5 tokens"),
        ("tokens.sequences.0.logprobs.0", -1.0, "a given token has the logprob"),
        ("tokens.sequences.0.logprobs.1", 0.5, "a sampled token has the logprob"),
        ("tokens.sequences.0.logprobs.1", float("nan"), "a sampled token has the logprob"),
        ("tokens.sequences.0.spans.1", Span(4, 2, 5), "the span of call 4 is from 2"),
        ("tokens.sequences.0.spans.1", Span(4, 4, 6), "the span of call 4 is from 4 to 6"),
        ("tokens.sequences.3.ids.1", 77, "sequence 3: its tokens up to call 0 are not those of sequence 0"),
        ("tokens.sequences.3.spans", [Span(0, 4, 6)], "call 0 is also trained in sequence 0"),
        ("tokens.sequences.3.spans", [Span(5, 4, 6)], "call 5 is also trained in sequence 1"),
        ("tokens.sequences.3.spans", [Span(2, 4, 6)], "call 2 is a side call, and trained"),
        ("tokens.sequences.1.breaks_history", False, "was rewritten after call 0"),
        ("agent.lineage.3.trained", [0, 3], "its spans are not the calls [0, 3]"),
        ("agent.lineage.3.calls", [4, 3], "call 4 is trained in no sequence that it continues"),
        ("agent.lineage.3.kind", "sub-agent", "the main agent's sequence is not the last"),
        ("agent.lineage.1.kind", "side", "a side call is trained"),
        ("agent.lineage.4.kind", "sub-agent", "4 sequences for the conversations"),
        ("agent.lineage", [], "4 sequences for the conversations"),
        ("agent.calls", [], "there are 0 calls"),
    ],
)
def test_whatever_is_changed_is_a_fault(path, value, fault):
    trace = agent_trace()
    change(path, value)(trace)
    found = list(find_faults(trace.tokens, trace.agent))
    assert any(fault in each for each in found), found


def test_turns_of_a_policy_are_each_trained_once():
    trace = policy_trace()
    trace.tokens.sequences[1].spans = [Span(1, 1, 2)]
    assert "call 1 is also trained" in next(find_faults(trace.tokens))
    trace.tokens.sequences[1].spans = [Span(4, 1, 2)]
    assert list(find_faults(trace.tokens)) == ["the spans name turns [0, 1, 4]"]


@pytest.fixture
def verify(treetune, tmp_path):
    def run(*traces):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "traces.jsonl").write_bytes(b"".join(encode_trace(trace) + b"\n" for trace in traces))
        return treetune("gateway", "verify", tmp_path / "run", "--json")

    return run


def test_the_command_prints_the_counts_of_a_run(verify, treetune, tmp_path):
    result = verify(agent_trace(), policy_trace())
    assert result.code == 0, result.err
    assert (result.json["passed"], result.json["calls"], result.json["trained"]) == (True, 10, 8)
    assert result.json["difference"] is None, "no model was named"
    shown = treetune("gateway", "verify", tmp_path / "run")
    assert "each sample is trained exactly once" in shown.out
    assert "sub agents" in shown.out


def test_the_command_fails_if_a_rollout_is_wrong(verify, treetune, tmp_path):
    wrong = agent_trace()
    wrong.tokens.sequences[3].mask[2] = 1
    result = verify(policy_trace(), wrong)
    assert result.code == 1
    assert result.json["faults"] == [
        {"rollout": "4/0", "fault": "sequence 3: the mask is not 1 exactly where its spans are"}
    ]
    assert "4/0: sequence 3" in treetune("gateway", "verify", tmp_path / "run").out


def test_a_run_without_tokens_is_not_called_right(verify):
    result = verify(Trace(task=Task(), uid="x"))
    assert result.code == 2
    assert "no rollout" in result.json["error"]
