"""The real verl, on a machine without a GPU: it reads what was built, scores it, and trains until it needs one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sides
import venvs
from kinds import KINDS, write_targets
from same_reward import runs_of
from verl_task import DOUBLES, ended

from treetune import Task
from treetune.cli.listing import TaskKind, cells

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"

SYSTEM = "Solve it step by step. End with: #### and the number."
ENDS_IN_NUMBER = {"column": "answer", "pattern": "#### (.+)"}


@pytest.fixture(scope="module")
def python() -> Path:
    return venvs.venv(*venvs.VERL)


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    venvs.run(python, SUPPORT / "tiny_model.py", folder)
    return folder


@pytest.fixture
def caches(tmp_path: Path) -> dict[str, str]:
    """The environment that keeps every cache in this test's folder."""
    return {"TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "library")}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`verl_side.py`, which starts once."""
    folder = tmp_path_factory.mktemp("program")
    with sides.open_side(venvs.VERL, "verl_side.py", folder, HF_HOME=str(folder / "library")) as ask:
        yield ask


@pytest.fixture
def verl(program: Callable[..., Any], model: Path, caches: dict[str, str]) -> Callable[..., Any]:
    """Asks it."""

    def ask(
        what: str, tasks: list[dict[str, Any]] = (), answers: list[str] | None = None, files: list[str] | None = None
    ) -> Any:
        asked = {"tasks": tasks, "files": files, "model": str(model), "answers": answers or []}
        return program(what, request=asked, variables=caches)

    return ask


def lines(path: Path, count: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[:count]]


def saved(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows in a file, and the `loading_params` that load it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"args": ["json"], "kwargs": {"data_files": str(path), "split": "train"}}


def number_of(row: dict[str, Any]) -> str:
    return row["answer"].split("####")[1].strip()


def test_its_dataset_reads_two_different_tasks_together_as_they_were_declared(verl, gsm8k, tmp_path):
    problems = lines(gsm8k / "train.jsonl", 12)
    chats = [
        {
            "conversations": [{"role": "user", "content": "Is 7 prime? é ✓"}],
            "result": 1,
            "tags": ["a", "b"],
            "level": 3,
        },
        {
            "conversations": [
                {"role": "system", "content": "Answer with a number."},
                {"role": "user", "content": 'What is {"a": 3}["a"]?'},
                {"role": "assistant", "content": "4"},
                {"role": "user", "content": "Look again."},
            ],
            "result": 3,
            "tags": [],
            "level": None,
        },
    ]
    tasks = [
        {
            "loading_params": saved(tmp_path / "gsm8k.jsonl", problems),
            "prompt_template": "{question}\n\nThink first.",
            "system_prompt": SYSTEM,
            "data_source": "gsm8k",
            "ability": "math",
            "ground_truth": ENDS_IN_NUMBER,
            "extra_fields": ["answer"],
        },
        {
            "loading_params": saved(tmp_path / "chats.jsonl", chats),
            "prompt_format": "chat_messages",
            "chat_messages_field": "conversations",
            "system_prompt": "Be brief.",
            "data_source": "my_chat",
            "ground_truth": "result",
            "extra_fields": ["tags", "level"],
        },
    ]

    rows = verl("rows", tasks)

    asked = [f"{row['question']}\n\nThink first." for row in problems]
    prompts = [
        *([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in asked),
        [{"role": "system", "content": "Be brief."}, *chats[0]["conversations"]],
        chats[1]["conversations"],
    ]
    truths = [*map(number_of, problems), "1", "3"]
    assert [row["prompt"] for row in rows] == prompts
    assert [row["raw_prompt"] for row in rows] == prompts
    assert [row["data_source"] for row in rows] == ["gsm8k"] * 12 + ["my_chat"] * 2
    assert [row["reward_model"] for row in rows] == [{"style": "rule", "ground_truth": truth} for truth in truths]
    assert [row["ability"] for row in rows] == ["math"] * 12 + [None] * 2
    assert [row["index"] for row in rows] == [*range(12), 0, 1]
    extra = [row["extra_info"] for row in rows]
    assert [info["index"] for info in extra] == [*range(12), 0, 1]
    assert [info["uid"] for info in extra] == [
        Task(prompt=prompt, reward_spec={"method": "rule", "ground_truth": truth}).uid
        for prompt, truth in zip(prompts, truths, strict=True)
    ]
    # A row has nothing where only the other task has a field.
    assert [info["answer"] for info in extra] == [*(row["answer"] for row in problems), None, None]
    assert [info["tags"] for info in extra] == [*[None] * 12, ["a", "b"], []]
    assert [info["level"] for info in extra] == [*[None] * 12, 3, None]
    assert rows[0]["rendered"] == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{asked[0]}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rows[13]["rendered"].count("<|im_start|>") == 5


SENTENCE = """
from treetune_verl.tasks import Task


class Sentence(Task):
    def reward(self, task, answer):
        return float(answer.endswith(self.config.get("ending")) and len(answer.split()) == task.extra_info["words"])
"""

OPPOSITE = """
from treetune import Environment, Step


class Opposite(Environment):
    def step(self, action):
        said = action.text.strip()
        right = said == self.task.extra_info["other"] and said not in self.task.messages[-1]["content"]
        return Step(reward=float(right), done=True, info={"answer": said})
"""


@pytest.fixture
def scored(gsm8k: Path, tmp_path: Path) -> tuple[list[dict[str, Any]], list[str], list[float]]:
    """Tasks scored by the rule, by a class's own reward and by an environment; answers to their rows; the rewards."""
    (tmp_path / "sentence.py").write_text(SENTENCE)
    (tmp_path / "opposite.py").write_text(OPPOSITE)
    problems = lines(gsm8k / "test.jsonl", 4)
    numbers = [number_of(row) for row in problems]
    tasks = [
        {
            "loading_params": saved(tmp_path / "gsm8k.jsonl", problems),
            "prompt_template": "{question}",
            "data_source": "gsm8k",
            "ground_truth": ENDS_IN_NUMBER,
        },
        {
            "custom_cls": {"path": str(tmp_path / "sentence.py"), "name": "Sentence"},
            "loading_params": saved(tmp_path / "sentences.jsonl", [{"words": 3}, {"words": 2}]),
            "prompt_template": "Write {words} words.",
            "data_source": "sentences",
            "extra_fields": ["words"],
            "ending": "!",
        },
        {
            "loading_params": saved(
                tmp_path / "words.jsonl", [{"word": "hot", "other": "cold"}, {"word": "wet", "other": "dry"}]
            ),
            "prompt_template": "The opposite of {word}?",
            "data_source": "words",
            "extra_fields": ["other"],
            "env_class": f"{tmp_path}/opposite.py:Opposite",
        },
    ]
    answers = [
        (f"So it is that.\n#### {numbers[0]}", 1.0),
        (f"{numbers[1]} at first, but then\n#### 123456789", 0.0),
        (f"It is \\boxed{{{numbers[2]}}}.", 1.0),
        ("I do not know.", 0.0),
        ("Here they are!", 1.0),
        ("Here they are!", 0.0),
        ("wet", 0.0),
        ("dry", 1.0),
    ]
    return tasks, [answer for answer, _ in answers], [reward for _, reward in answers]


def test_its_reward_manager_scores_each_row_as_its_own_task_says(verl, scored):
    tasks, answers, rewards = scored
    given = verl("scores", tasks, answers)
    assert given["manager"] == "NaiveRewardManager"
    assert [row["reward_score"] for row in given["rows"]] == rewards
    assert [row["reward_extra_info"]["acc"] for row in given["rows"]] == rewards
    # verl takes the keys of the first row for all.
    assert {tuple(row["reward_extra_info"]) for row in given["rows"]} == {("score", "acc", "answer")}


def test_its_reward_manager_gives_the_rewards_of_eval_for_every_kind_of_task(verl, caches, tmp_path, monkeypatch):
    for name, value in caches.items():
        monkeypatch.setenv(name, value)
    runs, rewards = runs_of(tmp_path, "verl")
    found = [[row["reward_score"] for row in verl("scores", **run)["rows"]] for run in runs]
    assert found == rewards
    assert {reward for run in rewards for reward in run} == {0.0, 1.0}


def test_a_python_task_is_read_by_its_dataset_and_scored_by_its_reward_manager(treetune, verl, caches, tmp_path):
    (tmp_path / "doubles.py").write_text(DOUBLES)
    (path,) = treetune("build", "doubles.py:Doubles", "--format", "verl", "--json", **caches).json["train_files"]
    for wrong in (0, 1):
        answers = [str(2 * n + wrong) for n in range(100)]
        rows = verl("scores", files=[path], answers=answers)["rows"]
        assert [row["reward_score"] for row in rows] == [1.0 - wrong] * 100


def test_the_reward_workers_of_a_training_give_the_same_scores(python, model, caches, tmp_path, scored):
    tasks, answers, rewards = scored
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    request.write_text(json.dumps({"tasks": tasks, "model": str(model), "answers": answers}))
    venvs.run(python, SUPPORT / "verl_side.py", "scores_on_ray", request, answer, timeout=300, **caches)
    assert json.loads(answer.read_text()) == rewards


def test_the_recipe_trains_on_our_files_until_it_needs_a_gpu(python, model, caches, gsm8k, tmp_path):
    saved(tmp_path / "train.jsonl", lines(gsm8k / "train.jsonl", 22))
    saved(tmp_path / "test.jsonl", lines(gsm8k / "test.jsonl", 7))
    code, printed = ended(
        [
            python, "-m", "treetune_recipe.math.main",
            "train_tasks.0.loading_params.args=[json]",
            "val_tasks.0.loading_params.args=[json]",
            f"+train_tasks.0.loading_params.kwargs.data_files.train='{tmp_path}/train.jsonl'",
            f"+val_tasks.0.loading_params.kwargs.data_files.test='{tmp_path}/test.jsonl'",
            f"actor_rollout_ref.model.path={model}",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "trainer.total_epochs=3",
            # Eight storage actors, the default, wait for ever for eight CPUs.
            "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
            "ray_kwargs.ray_init.num_cpus=4",
            "+ray_kwargs.ray_init.include_dashboard=false",
            f"hydra.run.dir={tmp_path}/hydra",
        ],
        log=tmp_path / "log",
        seconds=240,
        **caches,
    )  # fmt: skip
    built = {
        json.loads(sidecar.read_text())["rows"]: sidecar.with_suffix(".parquet")
        for sidecar in (tmp_path / "cache").glob("*.json")
    }
    for said in (
        f"'train_files': ['{built[22]}']",
        f"'val_files': ['{built[7]}']",
        "train dataset size: 22, val dataset size: 7",
        "Total training steps: 15",  # three epochs of five whole batches
        "ValueError: Total available GPUs 0 is less than total desired GPUs 1",
    ):
        assert said in printed, f"{said!r} is not in:\n{printed[-6000:]}"
    assert code == 1


# Images need a processor: tests/trainers/test_images_in_trainers.py. Several turns: tests/trainers/test_verl_loop.py
ELSEWHERE = (TaskKind.IMAGES, TaskKind.MULTI_TURN, TaskKind.TOOLS)


@pytest.mark.parametrize(
    "kind", [kind for kind in TaskKind if cells()["task"][kind]["verl"] is True and kind not in ELSEWHERE]
)
def test_a_kind_of_task_that_the_matrix_gives_it_is_scored(verl, treetune, tmp_path, caches, kind):
    write_targets(tmp_path)
    target, (answer,) = KINDS[kind]
    built = treetune("build", target, "--format", "verl", "-n", "2", "--json", **caches).json
    rows = verl("scores", files=built["train_files"], answers=[answer, "#### 77"])["rows"]
    assert [row["reward_score"] for row in rows] == [1.0, 0.0]
