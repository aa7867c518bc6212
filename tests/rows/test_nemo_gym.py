"""NeMo Gym's rows: what its servers read is there, what others wrote is read, and nothing is lost."""

from __future__ import annotations

import json

import pytest
from raising import raises_code

from treetune import Task
from treetune.data.rows.formats import FORMATS
from treetune.data.rows.reading import read_tasks
from treetune.data.validate import validate_dataset, write_tasks

FORMAT = FORMATS["nemo-gym"]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
THEIRS = [
    {"responses_create_params": {
        "input": [{"role": "developer", "content": "Be brief."},
                  {"role": "user", "content": [{"type": "input_text", "text": "2 + 2?"}]}],
        "tools": [{"type": "function", "name": "add"}], "temperature": 0.5},
     "expected_answer": "4", "question": "2 + 2?", "agent_ref": {"type": "responses_api_agents", "name": "simple"}},
    {"responses_create_params": {"input": "3 + 3?"}, "expected_answer": "6"},
]  # fmt: skip


@pytest.fixture
def theirs(tmp_path):
    path = tmp_path / "theirs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in THEIRS))
    return path


def test_a_row_has_a_request_and_the_expected_answer():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    task = Task(prompt=prompt, data_source="sums", reward_spec={"method": "rule", "ground_truth": 4})
    row = FORMAT.row_of(task)
    assert row["responses_create_params"] == {"input": prompt}
    assert row["expected_answer"] == "4", "its verifiers compare text"
    assert row["data_source"] == "sums"
    assert "prompt" not in row
    assert FORMAT.task_of(row) == task


def test_calls_of_tools_and_images_are_items_of_the_responses_api():
    url = "data:image/png;base64,AAAA"
    image = {"type": "image_url", "image_url": {"url": url}}
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "Add."}, image]},
        {"role": "assistant", "content": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 5."}]},
    ]
    task = Task(prompt=prompt)
    row = FORMAT.row_of(task)
    assert row["responses_create_params"]["input"] == [
        {"role": "user", "content": [{"type": "input_text", "text": "Add."},
                                     {"type": "input_image", "image_url": url, "detail": "auto"}]},
        {"role": "assistant", "content": "I add."},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "It is 5."}]},
    ]  # fmt: skip
    assert "treetune_columns" not in row
    assert FORMAT.task_of(row) == task


def test_rows_that_others_wrote_are_tasks_and_are_written_again_as_they_were(theirs, tmp_path):
    first, second = read_tasks(theirs)
    assert first.messages[1] == {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}
    assert (first.ground_truth, second.ground_truth) == ("4", "6")
    assert second.messages == [{"role": "user", "content": "3 + 3?"}]
    write_tasks(read_tasks(theirs), tmp_path / "again.jsonl", "nemo-gym")
    again = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    for name in ("responses_create_params", "expected_answer", "question", "agent_ref"):
        assert again[0][name] == THEIRS[0][name]
    # And from the rows of another trainer.
    write_tasks(read_tasks(theirs), tmp_path / "verl.jsonl", "verl")
    write_tasks(read_tasks(tmp_path / "verl.jsonl"), tmp_path / "back.jsonl", "nemo-gym")
    assert [task.uid for task in read_tasks(tmp_path / "back.jsonl")] == [first.uid, second.uid]
    assert json.loads((tmp_path / "back.jsonl").read_text().splitlines()[0])["agent_ref"]["name"] == "simple"


def test_a_column_of_the_users_own_by_that_name_stays_beside_the_ground_truth(tmp_path):
    row = {"prompt": [{"role": "user", "content": "?"}], "ground_truth": "4", "expected_answer": "mine"}
    (tmp_path / "trl.jsonl").write_text(json.dumps(row))
    write_tasks(read_tasks(tmp_path / "trl.jsonl"), tmp_path / "nemo.jsonl", "nemo-gym")
    assert json.loads((tmp_path / "nemo.jsonl").read_text())["expected_answer"] == "4"
    write_tasks(read_tasks(tmp_path / "nemo.jsonl"), tmp_path / "back.jsonl", "trl")
    back = json.loads((tmp_path / "back.jsonl").read_text())
    assert (back["ground_truth"], back["expected_answer"]) == ("4", "mine")


def test_the_command_line_converts_checks_and_plays_them(treetune, theirs, tmp_path):
    assert treetune("convert", "reverse-text", "out.jsonl", "--to", "nemo-gym").code == 0
    assert treetune("validate", "out.jsonl").code == treetune("validate", theirs).code == 0
    assert validate_dataset(tmp_path / "out.jsonl").formats == {str(tmp_path / "out.jsonl"): "nemo-gym"}
    assert treetune("eval", "out.jsonl", "-m", "scripted:gold", "--json").json["mean_reward"] == 1.0
    assert treetune("eval", theirs, "-m", "scripted:gold", "--json").json["mean_reward"] == 1.0
    assert treetune("convert", "out.jsonl", "back.parquet", "--to", "verl").code == 0
    original, back = treetune("show", "reverse-text", "--json").json, treetune("show", "back.parquet", "--json").json
    assert [task["uid"] for task in back["tasks"]] == [task["uid"] for task in original["tasks"]]


def test_only_json_lines_are_written_and_nothing_is_built(treetune, tmp_path):
    with raises_code("usage", ".parquet", ".jsonl"):
        write_tasks([Task(prompt="?")], tmp_path / "rows.parquet", "nemo-gym")
    result = treetune("build", "arithmetic", "-n", "3", "--format", "nemo-gym")
    assert (result.code, "treetune convert arithmetic rows.jsonl --to nemo-gym" in result.err) == (2, True)


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({}, "missing-prompt"),
        ({"input": []}, "empty-prompt"),
        ({"input": [{"role": "oracle", "content": "?"}]}, "unknown-role"),
        ([], "missing-prompt"),
    ],
)
def test_faults_are_found(tmp_path, params, rule):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"responses_create_params": params, "expected_answer": "1"}))
    assert rule in {finding.rule for finding in validate_dataset(tmp_path / "rows.jsonl").findings}
