"""Runs of other programs open as runs of ours. The recorded ones were written by those programs' own classes
(`tests/support/foreign_side.py`; `test_foreign_real.py` runs them again)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from raising import raises_code

from treetune.core.trace import Outcome
from treetune.evaluation import compare
from treetune.runs import discovery
from treetune.runs.discovery import find_run, open_run, runs_below

RECORDED = Path(__file__).parent / "recorded"


def figures(run):
    """Task, occurrence, rollout, step and reward of each."""
    return [(each.idx, each.occurrence, each.rollout, each.step, each.reward) for each in run.columns.entries]


def rewards_by_group(run):
    groups = run.groups()
    return [run.columns.reward[groups.task == task].tolist() for task in range(len(groups))]


# verl


def test_rollouts_of_verl_are_groups_by_prompt_and_step():
    run = open_run(RECORDED / "verl" / "rollouts")
    assert run.kind == "verl"
    assert rewards_by_group(run) == [[1.0, 0.0], [1.0, 1.0]] * 2
    assert figures(run)[4:6] == [(0, 1, 0, 2, 1.0), (0, 1, 1, 2, 0.0)]
    trace = run.trace("0/1")
    assert trace.task.ground_truth == "5"
    assert trace.task.prompt == "user\nWhat is 2 + 3?\nassistant\n"
    assert trace.messages[-1] == {"role": "assistant", "content": "6"}
    assert trace.metrics == {"acc": 0.0}
    assert trace.turns[0].info == {"pred": "6", "request_id": "r1"}
    assert [each.step for each in run.select("step=2 & mixed")] == [2, 2]
    assert len(run.select('"I think"')) == 2
    assert list(run.df()["step"]) == [1, 1, 1, 1, 2, 2, 2, 2]


def test_parts_of_one_rollout_of_verl_are_its_turns():
    run = open_run(RECORDED / "verl" / "rollouts-v1")
    assert rewards_by_group(run) == [[1.0, 0.0], [1.0, 1.0]] * 2
    trace = run.trace("0#0/0")
    assert [turn.message["content"] for turn in trace.turns] == ["I add.", "5"]
    assert trace.turns[1].observed[0]["content"].endswith("Sure?")


def test_validations_of_verl_are_compared_by_the_files_of_their_steps():
    validation = RECORDED / "verl" / "validation"
    assert [entry.step for entry in open_run(validation).columns.entries] == [0] * 4 + [10] * 4
    found = compare(open_run(validation / "0.jsonl"), open_run(validation / "10.jsonl"))
    assert (found.scored.before, found.scored.after) == (0.0, 0.75)
    assert len(found.fixed) == 2


# TRL


def test_completions_of_trl_open_by_its_output_folder():
    run = open_run(RECORDED / "trl" / "plain")
    assert run.kind == "trl"
    assert [entry.step for entry in run.columns.entries] == [1] * 8 + [2] * 8
    assert [len(group) for group in rewards_by_group(run)] == [4] * 4
    trace = run.trace("2/1")
    assert trace.task.messages == [{"role": "user", "content": "What is 2 + 3?"}]
    assert trace.metrics["vowels"] + trace.metrics["short"] == pytest.approx(trace.reward)
    assert list(trace.turns[0].info) == ["begins"]


def test_what_a_reward_function_of_trl_logs_beside_is_no_reward():
    run = open_run(RECORDED / "trl" / "plain")
    for trace in run.traces():
        assert trace.warnings == []
        assert trace.reward == pytest.approx(trace.metrics["vowels"] + trace.metrics.get("short", 0.0))
    for rewards, advantages in zip(rewards_by_group(run), np.split(run.columns.numbers("advantage"), 4), strict=True):
        assert np.argsort(rewards).tolist() == np.argsort(advantages).tolist()


def test_rewards_of_trl_whose_weights_are_not_told_are_summed_and_say_so():
    traces = list(open_run(RECORDED / "trl" / "weighted").traces())
    assert all("sum of vowels, short" in trace.warnings[0] for trace in traces if "short" in trace.metrics)


def test_a_batch_that_trl_logs_with_each_of_its_steps_is_there_once():
    files = sorted((RECORDED / "trl" / "again" / "completions").iterdir())
    assert [file.name for file in files] == ["completions_00001.parquet", "completions_00002.parquet"]
    assert [entry.step for entry in open_run(RECORDED / "trl" / "again").columns.entries] == [1] * 16


# Inspect


def test_a_log_of_inspect_is_a_run_whose_epochs_are_rollouts():
    run = open_run(RECORDED / "inspect" / "sums.eval")
    assert (run.kind, run.model, run.taskset, len(run)) == ("inspect", "mockllm/model", "sums", 8)
    assert run.mean_reward == pytest.approx(4 / 6)
    assert sorted((each.idx, each.rollout) for each in run.columns.entries) == [
        (a, b) for a in range(4) for b in (0, 1)
    ]
    trace = run.trace("0/1")
    assert (trace.reward, trace.success, trace.outcome) == (1.0, None, Outcome.COMPLETED)
    assert (trace.task.prompt, trace.task.ground_truth, trace.task.extra_info["level"]) == ("What is 2 + 3?", "5", 1)
    assert trace.metrics == {"includes": 1.0, "match": 1.0}
    first, second = trace.turns
    assert (first.calls[0].name, first.calls[0].arguments, first.calls[0].result) == ("add", {"x": 2, "y": 3}, "5")
    assert second.observed[0]["role"] == "tool"
    assert second.message["content"] == "The answer is 5"
    assert (trace.usage.prompt_tokens, trace.usage.completion_tokens) == (40, 14)
    assert trace.timing.total > 0


def test_what_failed_in_inspect_failed_here_and_a_limit_cut_it_short():
    run = open_run(RECORDED / "inspect" / "sums.eval")
    failed = run.trace("2/0")
    assert (failed.reward, failed.outcome, failed.failure.phase) == (None, Outcome.POLICY_ERROR, "policy")
    assert (failed.failure.type, failed.failure.message) == ("RuntimeError", "the model is out of order")
    assert run.trace("1/0").turns[0].calls[0].error == "13 is not added"
    cut = open_run(RECORDED / "inspect" / "chatter.json").trace("0/0")
    assert (cut.outcome, cut.reward, len(cut.turns), len(cut.final)) == (Outcome.TRUNCATED, 0.0, 2, 1)


def test_images_and_thoughts_of_inspect_are_where_ours_are():
    trace = open_run(RECORDED / "inspect" / "sums.eval").trace("3/0")
    assert trace.task.messages[0]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,iVBORw0KGgo")
    assert trace.messages[-1]["reasoning_content"] == "It is small."
    assert trace.task.ground_truth == ["A dot", "a point"]


# SkyRL


def test_evaluations_of_skyrl_are_a_curve_of_groups_with_their_turns():
    run = open_run(RECORDED / "skyrl" / "dumped_evals")
    assert run.kind == "skyrl"
    assert [each.step for each in run.columns.entries] == [None] * 2 + [5] * 4 + [10] * 4
    assert rewards_by_group(run)[2:] == [[1.0, 0.0], [1.0, 1.0]] * 2
    trace = run.trace("0#1/1")
    assert (trace.outcome, trace.task.data_source, trace.task.env_class) == (Outcome.TRUNCATED, "a/sums", "sums")
    assert trace.task.messages == [{"role": "user", "content": "What is 2 + 3?"}]
    assert [turn.message["content"] for turn in trace.turns] == ["7", "6"]
    assert trace.turns[1].observed == [{"role": "user", "content": "Really?"}]
    assert open_run(RECORDED / "skyrl" / "dumped_evals" / "global_step_5_evals").mean_reward == 0.75


def test_steps_of_one_rollout_of_skyrl_are_one_rollout():
    run = open_run(RECORDED / "skyrl" / "dumped_evals" / "eval_only")
    assert [(each.turns, each.reward) for each in run.columns.entries] == [(2, 0.5), (1, 1.0)]


def test_a_batch_that_skyrl_trained_on_has_tokens_and_says_what_it_lacks():
    run = open_run(RECORDED / "skyrl" / "dumped_data")
    assert [(each.idx, each.rollout, each.reward, each.step) for each in run.columns.entries] == [
        (0, 0, None, 1),
        (0, 1, None, 1),
        (1, 0, None, 1),
        (1, 1, None, 1),
    ]
    assert run.columns.numbers("advantage").round(3).tolist() == [0.7, -0.7, 0.0, 0.0]
    trace = run.trace("0/1")
    (sequence,) = trace.tokens.sequences
    assert len(sequence.ids) == len(sequence.mask) == len(sequence.logprobs)
    assert (sum(sequence.mask), sequence.mask[-2:], sequence.logprobs[-2:]) == (4, [1, 1], [-0.5, -0.5])
    assert "nor rewards" in trace.warnings[0]


def test_a_pickle_that_would_run_something_runs_nothing(tmp_path):
    import os
    import pickle

    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    folder = tmp_path / "dumped_data"
    folder.mkdir()
    (folder / "global_step_1_training_input.pkl").write_bytes(pickle.dumps(Harm()))
    with pytest.warns(UserWarning, match="not a batch of SkyRL"):
        assert len(open_run(folder)) == 0
    assert not (tmp_path / "harm").exists()


# NeMo Gym, by the schema of its classes: `test_foreign_real.py` opens the rollouts that it ships


def nemo_row(task, rollout, reward, *output, **more):
    request = {
        "input": [{"role": "user", "content": f"What is {task}?", "type": "message"}],
        "tools": [{"name": "add"}],
    }
    response = {"model": "some/model", "output": list(output), "usage": {"input_tokens": 9, "output_tokens": 4}}
    named = {"_ng_task_index": task, "_ng_rollout_index": rollout, "agent_ref": {"name": "simple"}}
    return {"responses_create_params": request, "response": response, "reward": reward, **named, **more}


def said(text, **tokens):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **tokens}


def write_lines(path, rows, mode="w"):
    with open(path, mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_rollouts_of_nemo_gym_have_their_calls_thoughts_and_tokens(tmp_path):
    first = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.1, -0.2]}
    last = {"prompt_token_ids": [1, 2, 3, 4, 5], "generation_token_ids": [6], "generation_log_probs": [-0.3]}
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I add."}]},
        {"type": "function_call", "name": "add", "arguments": '{"x": 2}', "call_id": "c1", **first},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        said("It is 5.", **last),
    ]
    rows = [
        nemo_row(2, 0, 1.0, *items, expected_answer="5", library_reward=0.5, note="x"),
        nemo_row(2, 1, 0.0, said("6")),
    ]
    write_lines(tmp_path / "rollouts.jsonl", rows)
    run = open_run(tmp_path / "rollouts.jsonl")
    assert (run.kind, [(each.idx, each.rollout) for each in run.columns.entries]) == ("nemo-gym", [(2, 0), (2, 1)])
    trace = run.trace("2/0")
    assert (trace.model, trace.task.data_source, trace.task.ground_truth) == ("some/model", "simple", "5")
    assert (trace.metrics, trace.turns[-1].info) == ({"library_reward": 0.5}, {"note": "x"})
    assert trace.turns[0].message["reasoning_content"] == "I add."
    assert (trace.turns[0].calls[0].arguments, trace.turns[0].calls[0].result) == ({"x": 2}, "5")
    assert trace.turns[1].message["content"] == "It is 5."
    assert trace.tokens.sequences[0].mask == [0, 0, 1, 1, 0, 1]
    assert (trace.usage.prompt_tokens, trace.tools[0]["function"]["name"]) == (9, "add")


def test_rollouts_of_nemo_gym_are_followed_and_failures_that_succeeded_are_gone(tmp_path):
    path, failures = tmp_path / "rollouts.jsonl", tmp_path / "rollouts_failures.jsonl"
    failed = {"_ng_failure_class": "transient", "error_message": "no answer"}
    write_lines(path, [nemo_row(0, 0, 1.0, said("0"))])
    write_lines(failures, [nemo_row(0, 1, 0.0, **failed), nemo_row(1, 0, 0.0, **failed)])
    (place,) = runs_below(tmp_path)
    run = place.open()
    assert [(each.idx, each.rollout, each.reward) for each in run.columns.entries] == [
        (0, 0, 1.0),
        (0, 1, None),
        (1, 0, None),
    ]
    assert run.trace("1/0").failure.message == "no answer"
    write_lines(path, [nemo_row(0, 1, 0.5, said("1"))], "a")
    run.follow()
    assert [(each.idx, each.rollout, each.reward) for each in run.columns.entries] == [
        (0, 0, 1.0),
        (0, 1, 0.5),
        (1, 0, None),
    ]
    assert len(run.groups()) == 2


def test_a_long_file_that_grows_is_read_from_where_it_ended(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    write_lines(path, [nemo_row(task, 0, 1.0, said("x" * 99)) for task in range(50)])
    run = open_run(path)
    size = path.stat().st_size
    write_lines(path, [nemo_row(50, 0, 0.0, said("y"))], "a")
    with open(path, "r+b") as file:  # what was read is not looked at again, but for its end
        file.write(b"#" * (size - 8192))
    assert (run.follow(), len(run), run.warnings) == (1, 51, [])


# Harbor, and ATIF of anybody


def test_a_job_of_harbor_is_a_run_and_its_trials_are_rollouts():
    run = open_run(RECORDED / "harbor")
    assert (run.kind, run.model, run.taskset) == ("atif", "some/model", "sums")
    solved, late, broken = sorted(run.traces(), key=lambda trace: -1 if trace.reward is None else trace.reward)[::-1]
    assert (solved.uid, solved.metrics, solved.timing.total) == (late.uid, {"style": 0.5}, 12.0)
    assert [turn.message["content"] for turn in solved.turns] == ["I look.", "Done."]
    assert (solved.turns[0].calls[0].name, solved.turns[0].calls[0].result) == ("bash", "5")
    assert solved.tokens.sequences[0].mask == [0, 0, 0, 1, 1, 0, 1]
    assert (late.reward, late.outcome) == (0.0, Outcome.TIMEOUT)
    assert [turn.message["content"] for turn in late.turns] == ["Hm.\n[image images/1.png]", "Still thinking."]
    assert (broken.outcome, broken.failure.type) == (Outcome.ENVIRONMENT_ERROR, "EnvironmentStartTimeoutError")
    assert broken.task.extra_info == {"task_name": "other"}


def test_a_trajectory_alone_is_a_run_without_a_reward(tmp_path):
    shutil.copy(RECORDED / "harbor" / "job" / "add__a1" / "agent" / "trajectory.json", tmp_path / "mine.json")
    (entry,) = open_run(tmp_path / "mine.json").columns.entries
    assert (entry.reward, entry.outcome, entry.turns, entry.tokens) == (None, "completed", 2, True)


# As they grow


@pytest.fixture
def rollouts(tmp_path):
    """A training of verl that goes on: the function writes the next step."""
    folder = tmp_path / "rollouts"
    folder.mkdir()

    def write(step, score=1.0, lines=2):
        row = {"input": "2 + 3?", "output": "5", "gts": "5", "score": score, "step": step}
        text = "".join(json.dumps({**row, "output": f"5{'!' * number}"}) + "\n" for number in range(lines))
        (folder / f"{step}.jsonl").write_text(text)

    return folder, write


def test_a_training_that_goes_on_is_followed(rollouts):
    folder, write = rollouts
    write(1)
    run = open_run(folder)
    assert (len(run), run.follow()) == (2, 0)
    write(2, 0.5)
    write(10, 0.0)
    assert run.follow() == 4
    assert figures(run)[2:] == [(0, 1, 0, 2, 0.5), (0, 1, 1, 2, 0.5), (0, 2, 0, 10, 0.0), (0, 2, 1, 10, 0.0)]
    assert [trace.reward for trace in run.traces("step>1")] == [0.5, 0.5, 0.0, 0.0]
    assert figures(open_run(folder)) == figures(run)


def test_a_step_that_is_written_again_replaces_what_it_was(rollouts):
    folder, write = rollouts
    for step in (1, 2, 3):
        write(step)
    run, other = open_run(folder), open_run(folder)
    write(2, 0.25, lines=3)  # a training that was taken up again from step 1
    (folder / "3.jsonl").unlink()
    run.follow()
    assert [(each.step, each.reward) for each in run.columns.entries] == [(1, 1.0)] * 2 + [(2, 0.25)] * 3
    assert [trace.reward for trace in run.traces("step=2")] == [0.25] * 3
    other.follow()
    assert figures(other) == figures(run)


def test_a_damaged_line_is_left_out_and_counted(rollouts):
    folder, write = rollouts
    write(1)
    with open(folder / "1.jsonl", "a") as file:
        file.write(
            '{"input": "cut\n[1]\n{"score": 1}\n{"input": "NaN?", "output": "x", "score": NaN, "step": 1}\n{"inp'
        )
    with pytest.warns(UserWarning, match=r"3 of the records cannot be read.*1\.jsonl, at byte"):
        run = open_run(folder)
    assert [each.reward for each in run.columns.entries] == [1.0, 1.0, None]


def test_a_file_that_is_half_written_counts_once_it_is_whole(tmp_path):
    folder = tmp_path / "completions"
    folder.mkdir()
    first, second = sorted((RECORDED / "trl" / "plain" / "completions").iterdir())
    shutil.copy(first, folder)
    run = open_run(tmp_path)
    (folder / second.name).write_bytes(second.read_bytes()[:2000])
    assert run.follow() == 0
    assert "1 of the records" in run.warnings[0]
    (folder / second.name).write_bytes(second.read_bytes())
    assert (run.follow(), len(run), run.warnings) == (8, 16, [])


def test_a_run_whose_files_are_gone_is_what_it_was(rollouts):
    folder, write = rollouts
    write(1)
    run = open_run(folder)
    shutil.rmtree(folder)
    assert (run.follow(), len(run), run.trace("0/0").reward) == (0, 2, 1.0)


def test_what_is_kept_is_not_read_again(rollouts):
    folder, write = rollouts
    write(1)
    before = open_run(folder).trace("0/0").messages
    file = folder / "1.jsonl"
    text, told = file.read_text(), file.stat()
    file.write_text(text.replace('"output"', '"OUTPUT"').replace('"OUTPUT"', '"output"', 1))
    os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns))  # nothing shows that it has changed
    write(2)
    run = open_run(folder)
    assert (len(run), run.trace("0/0").messages, list(run.warnings)) == (4, before, [])


@pytest.mark.thorough
def test_a_long_run_is_read_a_part_at_a_time(rollouts, tmp_path):
    folder, write = rollouts
    for step in range(5):
        write(step)
    path = tmp_path / "rollouts.jsonl"
    write_lines(path, [nemo_row(task, 0, 1.0, said("x")) for task in range(5)])
    for place in (find_run(folder), find_run(path)):
        run = place.open(seconds=0.0)
        sizes = [len(run)]
        assert run.share_read < 1.0
        while run.share_read < 1.0:
            run.follow(0.0)
            sizes.append(len(run))
        assert len(sizes) > 2
        assert sizes[-1] == len(set((each.idx, each.step, each.rollout) for each in run.columns.entries)) == len(run)
        assert figures(run) == figures(place.open())


@pytest.mark.parametrize(
    "file", sorted(file for file in RECORDED.rglob("*") if file.is_file()), ids=lambda file: file.name
)
@pytest.mark.quick_cases(2)
def test_a_file_that_is_cut_or_overwritten_is_no_error_of_ours(file, tmp_path):
    shutil.copytree(RECORDED, tmp_path / "all")
    copy, content = tmp_path / "all" / file.relative_to(RECORDED), file.read_bytes()
    for damaged in (content[: len(content) // 2], content[:99] + b"[]" + content[101:], b""):
        copy.write_bytes(damaged)
        for place in runs_below(tmp_path / "all" / file.relative_to(RECORDED).parts[0]):
            run = place.open()
            assert all(trace.uid for trace in run.traces())
            assert len(run.groups()) >= 0


def test_what_is_kept_is_listed_with_the_cache_and_removed_with_it(rollouts, treetune):
    folder, write = rollouts
    write(1)
    run = open_run(folder)
    assert treetune("cache", "list", "--json").json["runs"]["number"] == 1
    assert treetune("cache", "prune", "--older-than", 1, "--json").json["runs"]["number"] == 0
    assert "other programs' runs: 1" in treetune("cache", "prune", "--all").out
    assert not run.folder.exists()
    run.follow()
    assert len(run) == 2  # made again


# Finding them


def test_all_runs_below_a_folder_are_found_of_every_kind(tmp_path):
    from made_runs import make_run

    shutil.copytree(RECORDED, tmp_path / "all")
    make_run(tmp_path / "all" / "ours" / "one", [[1.0]])
    (tmp_path / "all" / "notes.json").write_text('{"version": 2}')
    (tmp_path / "all" / "rows.jsonl").write_text('{"prompt": "What is 2 + 3?", "ground_truth": "5"}\n')
    found = [(str(place.path.relative_to(tmp_path / "all")), place.kind) for place in runs_below(tmp_path / "all")]
    assert found == [
        ("harbor/job", "atif"),
        ("inspect/chatter.json", "inspect"),
        ("inspect/sums.eval", "inspect"),
        ("ours/one", "treetune"),
        ("skyrl/dumped_data", "skyrl"),
        ("skyrl/dumped_evals", "skyrl"),
        ("trl/again/completions", "trl"),
        ("trl/plain/completions", "trl"),
        ("trl/weighted/completions", "trl"),
        ("verl/rollouts", "verl"),
        ("verl/rollouts-v1", "verl"),
        ("verl/validation", "verl"),
    ]
    assert open_run(tmp_path / "all" / "ours").kind == "treetune"


def test_a_folder_with_several_runs_names_them_and_one_without_says_so(tmp_path):
    with raises_code("usage", "3 runs", "rollouts"):
        open_run(RECORDED / "verl")
    with raises_code("usage", "`eval`"):
        open_run(tmp_path)
    with raises_code("usage", "absent"):
        open_run(tmp_path / "absent")
    assert find_run(tmp_path / "absent") is None


def test_a_folder_without_end_is_not_searched_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "_MOST_FOLDERS", 50)
    shutil.copytree(RECORDED / "verl" / "rollouts", tmp_path / "z" / "near")
    for number in range(100):
        (tmp_path / "a" / str(number) / "deep").mkdir(parents=True)
    with pytest.warns(UserWarning, match="more than 50 folders.*Name a folder closer"):
        found = runs_below(tmp_path)
    assert [place.path.relative_to(tmp_path).parts[:2] for place in found] == [("z", "near")]


def test_the_process_that_reads_them_stays_for_the_next_one_also_if_ours_is_large(rollouts):
    large = bytearray(b"x") * (220 << 20)  # above the size at which that process would be replaced
    del large
    folder, write = rollouts
    readers = []
    for step in (1, 2, 3):
        write(step)
        open_run(folder)
        readers.append(readers_of_runs())
    assert readers[0]
    assert readers == readers[:1] * 3


def readers_of_runs():
    children = [task.read_text() for task in Path("/proc/self/task").glob("*/children")]
    return [
        pid
        for pid in " ".join(children).split()
        if "treetune.runs.foreign.cached_run" in Path(f"/proc/{pid}/cmdline").read_text()
    ]
