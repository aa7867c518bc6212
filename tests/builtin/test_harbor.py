"""Harbor tasks: folders read as they are drawn, commands and tests in the sandbox, rewards by Harbor's rules."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import warnings
from pathlib import Path

import pytest
from fake_docker import FakeDocker
from raising import raises_code

from treetune import Action, Completion, build_taskset, make
from treetune.core.score import Validity
from treetune.core.trace import Outcome
from treetune.errors import ConfigError
from treetune.evaluation import refuse_unservable
from treetune.play.rollout import run_rollout
from treetune.sandbox import Capability, probe
from treetune.tasksets.harbor import Dockerfile, HarborFolder, Unservable, pack
from treetune.tasksets.shell import list_blocks
from treetune.tasksets.target import load_taskset

pytestmark = pytest.mark.filterwarnings("ignore:.*stands in for the tasks' images")
sandboxed = pytest.mark.skipif(not probe().available, reason=str(probe()))

DOCKERFILE = "FROM python:3.12-slim\nWORKDIR /app\nCOPY names.txt .\n"
TEST = """#!/bin/bash
echo checking
if diff greetings.txt <(sed 's/.*/Hello, &!/' names.txt); then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""
SOLVE = "#!/bin/bash\nsed 's/.*/Hello, &!/' names.txt > greetings.txt\n"


def write_task(
    folder: Path, *, toml: str = "", dockerfile: str | None = DOCKERFILE, test: str = TEST, **files: str
) -> Path:
    """A task that asks for greetings; `files` by paths in which __ stands for a slash and _DOT_ for a dot."""
    contents = {
        "task.toml": f'schema_version = "1.4"\n{toml}',
        "instruction.md": "Greet everybody in names.txt, in greetings.txt.\n",
        "environment/names.txt": "Ada\nAlan\n",
        "tests/test.sh": test,
        "solution/solve.sh": SOLVE,
        **({} if dockerfile is None else {"environment/Dockerfile": dockerfile}),
        **{name.replace("__", "/").replace("_DOT_", "."): text for name, text in files.items()},
    }
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def taskset(folder: Path, **keys):
    return build_taskset({"id": "harbor", "folder": str(folder), **keys})


def play(folder: Path, *answers: str, **keys):
    """The steps of an episode of the only task in a folder."""
    task = taskset(folder, **keys)[0]

    async def run():
        environment = make(task.env_class, task)
        try:
            await environment.start()
            return [await environment.step(Action.of(answer)) for answer in answers]
        finally:
            await environment.close()

    return asyncio.run(run())


def block(script: str) -> str:
    return f"Let me see.\n```bash\n{script}\n```"


# Drawing


def test_tasks_are_read_as_they_are_drawn_in_the_order_of_their_names(tmp_path, monkeypatch):
    for name in ("b", "c", "a"):
        write_task(tmp_path / name, toml=f'[task]\nname = "org/{name}"\n')
    (tmp_path / "notes").mkdir()
    (tmp_path / "README.md").write_text("no task")
    drawn = taskset(tmp_path)
    (tmp_path / "c" / "task.toml").write_text("broken =")
    assert drawn.count() == 3
    assert [task.name for task in drawn.draw(2)] == ["org/a", "org/b"]
    assert drawn[1] == pickle.loads(pickle.dumps(drawn))[1] == list(drawn.draw(2))[1]
    with raises_code("taskset", "c/task.toml"):
        drawn[2]


def test_one_task_or_some_of_them_can_be_named(tmp_path):
    for name in ("sql-1", "sql-2", "web-1"):
        write_task(tmp_path / name)
    assert [task.name for task in taskset(tmp_path / "web-1").draw()] == ["web-1"]
    assert [task.name for task in taskset(tmp_path, tasks=["sql-*", "nothing"]).draw()] == ["sql-1", "sql-2"]
    with raises_code("config", "3 tasks"):
        taskset(tmp_path, tasks=["nothing"])
    with raises_code("config", "taskset.folder", "nowhere"):
        taskset(tmp_path / "nowhere")


def test_a_root_file_system_that_is_none_is_refused(tmp_path, monkeypatch):
    write_task(tmp_path / "tasks" / "a")
    with raises_code("config", "taskset.rootfs"):
        taskset(tmp_path / "tasks", rootfs=str(tmp_path))
    with raises_code("config", "taskset.rootfs", "bubblewrap"):
        taskset(tmp_path / "tasks", rootfs=str(tmp_path), sandbox="docker")
    write_rootfs(tmp_path / "bookworm")
    monkeypatch.chdir(tmp_path)
    found = taskset(tmp_path / "tasks", rootfs="bookworm")
    assert found.config.rootfs == found[0].extra_info["rootfs"] == str(tmp_path / "bookworm")


def test_a_root_file_system_that_a_yaml_names_is_beside_it(tmp_path, monkeypatch):
    write_task(tmp_path / "tasks" / "a")
    write_rootfs(tmp_path / "bookworm")
    (tmp_path / "harbor.yaml").write_text("taskset: {id: harbor, folder: tasks, rootfs: bookworm}\n")
    monkeypatch.chdir("/")
    assert load_taskset(str(tmp_path / "harbor.yaml")).config.rootfs == str(tmp_path / "bookworm")


def write_rootfs(folder: Path) -> None:
    """What is looked for in a root file system; nothing could run in it."""
    for name in ("bin/bash", "usr/bin/python3"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()


def test_what_is_changed_changes_the_task_and_the_fingerprint(tmp_path):
    write_task(tmp_path / "a")
    before = taskset(tmp_path)
    uid, source = before[0].uid, before.source()
    write_task(tmp_path / "a", solution__solve_DOT_sh="#!/bin/sh\necho other\n")
    assert (taskset(tmp_path)[0].uid, taskset(tmp_path).source()) == (uid, source)
    write_task(tmp_path / "a", test=TEST + "# changed\n")
    assert taskset(tmp_path)[0].uid != uid
    assert taskset(tmp_path).source() != source


def test_a_folder_that_is_no_task_says_what_is_missing(tmp_path):
    (write_task(tmp_path / "a") / "instruction.md").unlink()
    with raises_code("taskset", "instruction.md", "task.toml"):
        taskset(tmp_path)[0]


def test_types_in_the_toml_are_checked(tmp_path):
    write_task(tmp_path / "a", toml='[agent]\ntimeout_sec = "soon"\n')
    with raises_code("taskset", "task.toml", "agent.timeout_sec"):
        taskset(tmp_path)[0]


def test_the_host_is_said_to_stand_in_for_the_image(tmp_path):
    write_task(tmp_path / "a")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(taskset(tmp_path).draw())
    assert "the host's system replaces the tasks' images (of a: python:3.12-slim)" in str(caught[0].message)


def test_where_no_sandbox_starts_it_is_refused_before_the_first_task(tmp_path, monkeypatch):
    write_task(tmp_path / "a")
    monkeypatch.setattr("treetune.sandbox.probe", lambda: Capability(cause="forbidden", remedy="allow it"))
    with raises_code("taskset", "harbor", "allow it"):
        refuse_unservable(taskset(tmp_path))


# Gold


@sandboxed
@pytest.mark.thorough
def test_gold_earns_one_on_the_command_line(tmp_path, treetune):
    write_task(tmp_path / "tasks" / "a")
    write_task(
        tmp_path / "tasks" / "b",
        toml='[solution]\nenv = { WORD = "it\'s" }\n',
        test='#!/bin/bash\n[ "$(cat out)" = "it\'s me" ] && echo 1.0 > /logs/verifier/reward.txt\n',
        solution__solve_DOT_sh='#!/bin/bash\n. "$(dirname "$0")/lib/say.sh"\n',
        solution__lib__say_DOT_sh='echo "$WORD me" > out\n',
    )
    write_task(tmp_path / "tasks" / "c", solution__solve_DOT_sh=f"{SOLVE}cat > notes.md <<'END'\n```\n````\nEND\n")
    result = treetune("eval", "harbor", "--taskset.folder", "tasks", "-m", "scripted:gold", "--json")
    assert result.json["mean_reward"] == 1.0
    assert result.json["outcomes"] == {"completed": 3}
    checked = treetune("validate", "harbor", "--taskset.folder", "tasks", "--json")
    assert (checked.code, checked.json["valid"]) == (0, 3)


@sandboxed
def test_a_solution_that_does_not_solve_is_found(tmp_path, treetune):
    write_task(tmp_path / "tasks" / "a", solution__solve_DOT_sh="#!/bin/bash\necho nothing\n")
    checked = treetune("validate", "harbor", "--taskset.folder", "tasks", "--json")
    assert checked.json["findings"][0]["rule"] == "gold-not-rewarded"


def test_without_a_solution_there_is_no_gold(tmp_path):
    (write_task(tmp_path / "a") / "solution" / "solve.sh").unlink()
    assert taskset(tmp_path).gold(taskset(tmp_path)[0]) is None


# An episode


@sandboxed
def test_files_stay_from_turn_to_turn_and_the_tests_decide(tmp_path):
    steps = play(
        write_task(tmp_path),
        block("pwd; cat names.txt; export X=1"),
        block("echo 'Hello, Ada!' > greetings.txt; echo -n $X; exit 4"),
        block("echo 'Hello, Alan!' >> greetings.txt; cat greetings.txt"),
        "DONE",
    )
    shown = [step.observation.content for step in steps]
    assert shown == [
        "/app\nAda\nAlan\n(exit code 0)",
        "(exit code 4)",
        "Hello, Ada!\nHello, Alan!\n(exit code 0)",
        "",
    ]
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0, 1.0]
    assert [step.done for step in steps] == [False, False, False, True]
    assert not steps[-1].truncated
    assert steps[-1].info["explanation"] == "checking"
    assert steps[-1].info["metrics"] == {"reward": 1.0, "turns": 4}


@sandboxed
def test_a_wrong_result_is_zero_and_no_error(tmp_path):
    (step,) = play(write_task(tmp_path), f"{block('echo hi > greetings.txt')}\n\nDone.")
    assert (step.reward, step.done, step.truncated) == (0.0, True, False)
    assert "Hello, Ada!" in step.info["explanation"]


@sandboxed
@pytest.mark.parametrize(
    "answer", ["", "ls", "```bash\nls\n```\n```bash\nls\n```\nDONE", "```bash\necho cut o", "```python\nprint()\n```"]
)
@pytest.mark.quick_cases(2)
def test_an_answer_that_is_no_command_costs_a_turn(tmp_path, answer):
    steps = play(write_task(tmp_path), answer, answer, max_turns=2)
    assert "Nothing was run" in steps[0].observation.content
    assert [(step.done, step.truncated) for step in steps] == [(False, False), (True, True)]


@sandboxed
def test_the_last_turn_is_followed_by_the_tests(tmp_path):
    steps = play(write_task(tmp_path), block("true"), block(SOLVE), max_turns=2)
    assert (steps[-1].reward, steps[-1].done, steps[-1].truncated) == (1.0, True, True)


@sandboxed
def test_neither_tests_nor_solution_are_there_before_the_end(tmp_path):
    steps = play(
        write_task(tmp_path), block("ls / /tests /solution; find / -name test.sh -o -name solve.sh 2>/dev/null")
    )
    assert "test.sh" not in steps[0].observation.content
    assert "solve.sh" not in steps[0].observation.content


@sandboxed
def test_a_command_has_a_deadline_and_all_together_have_one(tmp_path):
    write_task(tmp_path, toml="[agent]\ntimeout_sec = 2\n")
    steps = play(tmp_path, block("echo a > kept; sleep 60"), block("cat kept; sleep 60"), command_seconds=1)
    assert steps[0].observation.content == "(stopped after 1 seconds)"
    assert steps[1].observation.content.startswith("a\n(stopped after")
    assert (steps[1].done, steps[1].truncated) == (True, True)


@sandboxed
def test_variables_come_from_dockerfile_and_toml_and_those_of_the_tests_only_there(tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_HOST", "host")
    write_task(
        tmp_path,
        dockerfile='FROM x\nENV A="one two" B=$A\nENV C three\nWORKDIR /srv/$C\n',
        toml='[environment]\nenv = { D = "${FROM_HOST}", E = "${NOT_SET_ANYWHERE:-default}" }\n'
        '[verifier]\nenv = { SECRET = "s" }\n',
        test='[ $SECRET$D = shost ] && echo \'{"reward": 0.5, "other": 2}\' > /logs/verifier/reward.json\n',
    )
    steps = play(tmp_path, block("echo $A,$B,$C,$D,$E,$SECRET,$HOME; pwd"), "DONE")
    assert steps[0].observation.content.startswith("one two,one two,three,host,default,,/root\n/srv/three\n")
    assert steps[1].reward == 0.5
    assert steps[1].info["metrics"] == {"reward": 0.5, "other": 2.0, "turns": 2}


@sandboxed
def test_the_working_folder_of_the_toml_wins(tmp_path):
    write_task(tmp_path, toml='[environment]\nworkdir = "/elsewhere"\n')
    assert play(tmp_path, block("pwd"))[0].observation.content.startswith("/elsewhere\n")


@sandboxed
def test_files_that_do_not_fit_are_told(tmp_path):
    write_task(tmp_path, dockerfile="FROM x\nCOPY . /data\n", environment__big="x" * (3 << 20))
    with raises_code("environment", "2 MB", "disk_mb"):
        play(tmp_path, "DONE", disk_mb=2)


# Rewards


@sandboxed
@pytest.mark.parametrize(
    ("files", "reward"),
    [
        ({"reward.txt": "1"}, 1.0),
        ({"reward.txt": " 0.25\n"}, 0.25),
        ({"reward.json": "0.5", "reward.txt": "1"}, 0.5),
        ({"reward.json": '{"reward": 1, "style": 0.2}'}, 1.0),
        ({"reward.json": '{"tests": 1, "style": 0.5}'}, 0.75),
        ({"reward.txt": "-1"}, -1.0),
    ],
)
@pytest.mark.quick_cases(3)
def test_the_reward_is_what_the_tests_write(tmp_path, files, reward):
    test = "".join(f"echo '{text}' > /logs/verifier/{name}\n" for name, text in files.items())
    assert play(write_task(tmp_path, test=test), "DONE")[0].reward == reward


@sandboxed
@pytest.mark.parametrize(
    "test",
    [
        "exit 1",
        ": > /logs/verifier/reward.txt",
        "echo one > /logs/verifier/reward.txt",
        "echo nan > /logs/verifier/reward.txt",
        ": > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt",
        "echo '{}' > /logs/verifier/reward.json",
        'echo \'{"reward": "high"}\' > /logs/verifier/reward.json',
        "echo true > /logs/verifier/reward.json",
        "echo '[1]' > /logs/verifier/reward.json",
        "mkdir /logs/verifier/reward.txt",
        "kill -9 -1",
        "sleep 60",
    ],
)
@pytest.mark.quick_cases(2)
def test_a_reward_that_is_no_number_is_an_error_and_not_zero(tmp_path, test):
    write_task(tmp_path / "a", test=test, toml="[verifier]\ntimeout_sec = 1\n")
    drawn = taskset(tmp_path)

    class Finished:
        name = "finished"

        async def complete(self, request):
            return Completion(text="DONE")

    trace = asyncio.run(run_rollout(drawn, drawn[0], Finished()))
    assert trace.outcome is Outcome.ENVIRONMENT_ERROR
    assert "reward" in trace.failure.message or "did not end within 1 seconds" in trace.failure.message


FORGE_COMPILED = """python3 - <<'END'
import importlib.util, marshal, tarfile
path = importlib.util.cache_from_source(tarfile.__file__)
forged = '''
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            open("/logs/verifier/reward.json", "w").write("1")
        except OSError:
            pass
        time.sleep(0.001)
'''
code = compile(open(tarfile.__file__).read() + forged, tarfile.__file__, "exec")
with open(path, "rb") as file:
    head = file.read(16)
with open(path, "wb") as file:
    file.write(head + marshal.dumps(code))
END
"""


@sandboxed
@pytest.mark.parametrize(
    "cheat",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod -R 500 /tests",
        "ln -s /app /logs; echo 1 > reward.json",
        "rm /bin; mkdir /bin; echo 'echo 1 > /logs/verifier/reward.txt' > /bin/bash; chmod +x /bin/bash",
        "echo 'echo 1 > /logs/verifier/reward.json' >> ~/.bashrc; echo 'BASH_ENV=~/.bashrc' > /etc/environment",
        "(while :; do echo 1 > /logs/verifier/reward.json; done) & disown",
        "mkdir many; cd many; seq 200000 | xargs touch",
        "head -c 400M /dev/zero > /app/fill",
        "echo x > /logs",
        "ln -s /nowhere /logs; ln -s /app /tests",
        "mkdir -p /logs/verifier/reward.txt; chmod 0 /logs/verifier /logs",
        "rm /usr/bin/diff; ln -s true /usr/bin/diff",
        FORGE_COMPILED,
        "bomb() { bomb | bomb & }; bomb; (while :; do echo 1 > /logs/verifier/reward.json; done) &",
    ],
)
@pytest.mark.quick_cases(2)
def test_what_the_policy_leaves_behind_earns_nothing(tmp_path, cheat):
    steps = play(write_task(tmp_path), block(cheat), "DONE", disk_mb=16, command_seconds=10)
    assert (steps[1].reward, steps[1].done) == (0.0, True)


@sandboxed
def test_programs_that_were_changed_are_named(tmp_path):
    (step,) = play(write_task(tmp_path), f"{block(SOLVE + 'rm /usr/bin/diff; ln -s true /usr/bin/diff')}\nDONE")
    assert step.info["explanation"] == "programs that the tests rely on were changed: /usr/bin/diff"


@sandboxed
def test_programs_in_the_background_run_on_and_end_before_the_tests(tmp_path):
    test = "pgrep sleep || echo 1 > /logs/verifier/reward.txt"
    begun = "for _ in $(seq 1000); do pgrep sleep > /dev/null && break; done; pgrep -c sleep"
    steps = play(write_task(tmp_path, test=test), block("sleep 1000 &"), block(begun), "DONE")
    assert steps[1].observation.content == "1\n(exit code 0)"
    assert steps[2].reward == 1.0


@sandboxed
def test_files_are_copied_to_folders_of_the_system_and_stay_changed(tmp_path):
    write_task(
        tmp_path,
        dockerfile="FROM x\nCOPY --chmod=755 names.txt /usr/local/bin/names\nWORKDIR /etc/greet\n",
        test="test -x /usr/local/bin/names && cat /etc/made > /logs/verifier/reward.txt",
    )
    steps = play(tmp_path, block("pwd; head -1 /usr/local/bin/names; echo 0.5 > /etc/made"), "DONE")
    assert steps[0].observation.content == "/etc/greet\nAda\n(exit code 0)"
    assert steps[1].reward == 0.5


# Containers


@sandboxed
def test_with_docker_a_task_is_played_in_a_container_of_its_image(tmp_path, sockets, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{sockets}/docker.sock")
    write_task(tmp_path / "a")
    toml = '[environment]\ndocker_image = "org/img"\nworkdir = "/srv"\n'
    write_task(tmp_path / "b", dockerfile="FROM y\nRUN make\n", toml=toml, test="cat w > /logs/verifier/reward.txt")
    drawn = taskset(tmp_path, sandbox="docker")

    async def run():
        async with FakeDocker(f"{sockets}/docker.sock") as engine:
            rewards = []
            for task, script in zip(drawn.draw(), (SOLVE, "echo 0.5 > w; pwd"), strict=True):
                environment = make(task.env_class, task)
                await environment.start()
                rewards.append((await environment.step(Action.of(f"{block(script)}\nDONE"))).reward)
                await environment.close()
            return rewards, engine.images, engine.configs

    assert asyncio.run(run()) == ([1.0, 0.5], ["python:3.12-slim", "org/img"], {})


# Datasets


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A repository with tasks, of which the last commit has one less."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "published"
    write_task(folder / "tasks" / "a")
    write_task(folder / "tasks" / "b")
    write_task(folder / "c")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    git(folder, "rm", "-qr", "tasks/b")
    git(folder, "commit", "-qm", "two")
    return folder


def dataset_names(**keys) -> list[str]:
    return [task.name for task in build_taskset({"id": "harbor", **keys}).draw()]


def test_a_dataset_is_downloaded_once_by_its_git_address(published):
    address = f"file://{published}@main"
    assert dataset_names(dataset=address) == ["c"]
    published.rename(published.with_name("elsewhere"))
    assert dataset_names(dataset=address) == ["c"]


def test_a_git_address_may_name_a_branch_and_the_folder_of_the_tasks(published):
    address = f"file://{published}"
    assert dataset_names(dataset=f"{address}@main#tasks") == ["a"]
    assert dataset_names(dataset=f"{address}#tasks") == ["a"]
    assert dataset_names(dataset=f"{address}#tasks/a") == ["a"]
    assert dataset_names(dataset=f"{address}@main") == ["c"]  # each address has a place of its own in the cache


def test_a_git_address_without_tasks_says_where_they_are(published, tmp_path):
    git(published, "mv", "c", "tasks/c")
    git(published, "commit", "-qm", "three")
    address = f"file://{published}@main"
    with pytest.raises(ConfigError) as error:
        dataset_names(dataset=address)
    assert "taskset.dataset" in str(error.value)
    assert "taskset.folder" not in str(error.value)
    assert f"write taskset.dataset: {address}#tasks" in str(error.value)
    assert dataset_names(dataset=f"{address}#tasks") == ["a", "c"]


@pytest.mark.parametrize("folder", ["none", "..", "../..", "/etc"])
def test_a_folder_that_the_repository_has_not_is_refused(published, folder):
    with raises_code("taskset", folder, "c, tasks"):
        dataset_names(dataset=f"file://{published}@main#{folder}")


def test_a_folder_without_tasks_says_where_they_are(tmp_path):
    write_task(tmp_path / "all" / "tasks" / "a")
    with raises_code("config", "taskset.folder", "/all/tasks"):
        dataset_names(folder=str(tmp_path / "all"))
    with raises_code("config", "taskset.tasks", "1 tasks"):
        dataset_names(folder=str(tmp_path / "all" / "tasks"), tasks=["b-*"])


def test_a_dataset_is_found_by_name_in_a_registry(published, tmp_path):
    first = git(published, "rev-parse", "HEAD~1")
    git(published, "config", "uploadpack.allowAnySHA1InWant", "true")
    tasks = [{"name": n, "path": f"tasks/{n}", "git_url": f"file://{published}", "git_commit_id": first} for n in "ab"]
    registry = tmp_path / "registry.json"
    entries = [{"name": "greet", "version": "1.0", "tasks": tasks}, {"name": "greet", "version": "2.0", "tasks": []}]
    registry.write_text(json.dumps(entries))
    assert dataset_names(dataset="greet@1.0", registry=str(registry)) == ["a", "b"]
    with raises_code("unknown-name", "'gret@1.0'", "greet@1.0"):
        dataset_names(dataset="gret@1.0", registry=str(registry))


def test_a_dataset_that_cannot_be_had_says_what_to_do(published, tmp_path):
    with raises_code("taskset", "--taskset.folder"):
        dataset_names(dataset=f"file://{tmp_path}/none")
    with raises_code("taskset", "registry", "--taskset.folder"):
        dataset_names(dataset="greet", registry=str(tmp_path / "none.json"))
    with raises_code("config", "taskset.folder"):
        dataset_names()
    assert list((tmp_path / "cache" / "treetune" / "harbor").iterdir()) == []


# What is refused


@pytest.mark.parametrize(
    ("said", "keys"),
    [
        (
            "environment/Dockerfile, line 3, RUN apt-get install curl",
            {"dockerfile": "FROM x\n\nRUN apt-get \\\n install curl\n"},
        ),
        ("line 2, USER me", {"dockerfile": "FROM x\nUSER me\n"}),
        ("line 2, FROM y", {"dockerfile": "FROM x AS one\nFROM y\n"}),
        ("line 1, ARG V=1", {"dockerfile": "ARG V=1\nFROM x\n"}),
        ("line 2, ADD a b", {"dockerfile": "FROM x\nadd a b\n"}),
        ("line 2, COPY --from=one", {"dockerfile": "FROM x\nCOPY --from=one /a /b\n"}),
        ("line 2, COPY none /b: there is no such file", {"dockerfile": "FROM x\nCOPY none /b\n"}),
        ("line 2, COPY ../task.toml /b: there is no such file", {"dockerfile": "FROM x\nCOPY ../task.toml /b\n"}),
        ("COPY names.txt /sys/x: the kernel's folders", {"dockerfile": "FROM x\nCOPY names.txt /sys/x\n"}),
        ("WORKDIR /proc: the kernel's folders", {"dockerfile": "FROM x\nWORKDIR /proc\n"}),
        ("COPY <<EOF /x", {"dockerfile": "FROM x\nCOPY <<EOF /x\nEOF\n"}),
        ("# escape=`", {"dockerfile": "# escape=`\nFROM x\n"}),
        ("there is no FROM", {"dockerfile": "# nothing\n"}),
        ("no environment/Dockerfile", {"dockerfile": None}),
        (
            "environment.docker_image = 'org/img'",
            {"dockerfile": None, "toml": '[environment]\ndocker_image = "org/img"\n'},
        ),
        ("environment/docker-compose.yaml", {"environment__docker-compose_DOT_yaml": "services: {}"}),
        ("environment/.dockerignore", {"environment___DOT_dockerignore": "*"}),
        ("environment.os = 'windows'", {"toml": '[environment]\nos = "windows"\n'}),
        ("environment.gpus = 1", {"toml": "[environment]\ngpus = 1\n"}),
        ("environment.mcp_servers", {"toml": '[[environment.mcp_servers]]\nname = "x"\n'}),
        ("environment.healthcheck", {"toml": '[environment.healthcheck]\ncommand = "true"\n'}),
        ("[[steps]]", {"toml": '[[steps]]\nname = "one"\n'}),
        ("agent.user = 'agent'", {"toml": '[agent]\nuser = "agent"\n'}),
        (
            "${NOT_SET_ANYWHERE}: this variable is not set",
            {"toml": '[environment]\nenv = { A = "${NOT_SET_ANYWHERE}" }\n'},
        ),
    ],
)
def test_a_task_that_needs_a_container_engine_is_refused_by_name(tmp_path, said, keys):
    write_task(tmp_path / "a", **keys)
    drawn = taskset(tmp_path)
    task = drawn[0]
    verdict = drawn.validate(task)
    assert verdict.validity is Validity.INVALID
    assert said in verdict.reason
    with raises_code("environment", "--taskset.unsupported"):
        asyncio.run(make("harbor", task).start())
    assert drawn.gold(task) is None


def test_what_cannot_be_served_can_be_left_out(tmp_path):
    write_task(tmp_path / "a", toml="[environment]\ngpus = 1\n")
    write_task(tmp_path / "b")
    with pytest.warns(UserWarning, match=r"1 of 2 tasks .* left out, such as a \(task\.toml, environment\.gpus = 1\)"):
        drawn = taskset(tmp_path, unsupported="skip")
    assert [task.name for task in drawn.draw()] == ["b"]


def test_harmless_keys_and_users_are_accepted(tmp_path):
    toml = '[agent]\nuser = "root"\nnetwork_mode = "public"\n[environment]\ncpus = 4\nstorage_mb = 10240\nnew_key = 1\n'
    assert HarborFolder(write_task(tmp_path, toml=toml)).refusal is None


def test_a_task_without_tests_is_invalid(tmp_path):
    (write_task(tmp_path / "a") / "tests" / "test.sh").unlink()
    drawn = taskset(tmp_path)
    assert drawn.validate(drawn[0]).reason == "there is no tests/test.sh"


def test_links_that_lead_out_of_the_task_are_not_followed(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("private")
    folder = write_task(tmp_path / "a")
    (folder / "tests" / "key").symlink_to(tmp_path / "secret" / "key")
    (folder / "environment" / "keys").symlink_to(tmp_path / "secret")
    assert b"private" not in HarborFolder(folder).pack_part("tests")
    write_task(folder, dockerfile="FROM x\nCOPY keys /keys\n")
    assert (
        HarborFolder(folder).refusal
        == "environment/Dockerfile, line 2, COPY keys /keys: it leads out of the folder: keys"
    )
    write_task(folder, dockerfile="FROM x\nCOPY . /all\n")
    assert b"private" not in pack(HarborFolder(folder).recipe.files)


# Dockerfiles


def places(dockerfile: str, context: Path) -> dict[str, str]:
    return {
        target: source.relative_to(context).as_posix()
        for source, target, _ in Dockerfile.parse(dockerfile, context).files
        if source.is_file()
    }


def test_files_are_copied_where_docker_would_put_them(tmp_path):
    for name in ("a.txt", "b.txt", "src/main.py", "src/deep/x", "two words"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    head = "FROM x\nWORKDIR /app\n"
    assert places(head + "COPY a.txt .", tmp_path) == {"/app/a.txt": "a.txt"}
    assert places(head + "COPY a.txt b", tmp_path) == {"/app/b": "a.txt"}
    assert places(head + "COPY a.txt /app", tmp_path) == {"/app/a.txt": "a.txt"}
    assert places(head + "COPY a.txt b.txt data/", tmp_path) == {"/app/data/a.txt": "a.txt", "/app/data/b.txt": "b.txt"}
    assert places(head + "COPY *.txt /d/", tmp_path) == {"/d/a.txt": "a.txt", "/d/b.txt": "b.txt"}
    assert places(head + "COPY src /s", tmp_path) == {"/s/main.py": "src/main.py", "/s/deep/x": "src/deep/x"}
    assert places(head + "COPY --chmod=755 src/ ./", tmp_path)["/app/main.py"] == "src/main.py"
    assert places(head + 'COPY --chown=me ["two words", "/w"]', tmp_path) == {"/w": "two words"}
    assert set(places("FROM x\nCOPY . /", tmp_path)) == {
        "/a.txt",
        "/b.txt",
        "/src/main.py",
        "/src/deep/x",
        "/two words",
    }
    with pytest.raises(Unservable, match="it has no target"):
        Dockerfile.parse("FROM x\nCOPY a.txt", tmp_path)


def test_folders_and_variables_follow_each_other(tmp_path):
    recipe = Dockerfile.parse(
        "# syntax=docker/dockerfile:1\nFROM --platform=linux/amd64 python:3 AS base\n"
        "ENV ROOT=/srv \\\n# why\n  NAME='a b'\n"
        "WORKDIR $ROOT/app\nWORKDIR sub\nENV OLD style value\n",
        tmp_path,
    )
    assert (recipe.base, recipe.workdir) == ("python:3", "/srv/app/sub")
    assert recipe.env == {"ROOT": "/srv", "NAME": "a b", "OLD": "style value"}


# Answers


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```bash\nls\n```", ["ls"]),
        ("```\nls\n```", ["ls"]),
        ("  ```sh\nls\npwd\n  ```", ["ls\npwd"]),
        ("````bash\ncat <<E\n```\nE\n````", ["cat <<E\n```\nE"]),
        ("```bash\nls\n```\n\n```bash\npwd\n```", ["ls", "pwd"]),
        ("```bash\nls", []),
        ("```json\n{}\n```", []),
        ("no block", []),
    ],
)
def test_commands_stand_in_blocks(text, blocks):
    assert list_blocks(text) == blocks
