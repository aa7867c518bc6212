"""OS interaction: samples as AgentBench writes them, actions, evaluations, rewards that cannot be had by mischief."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest
from raising import raises_code

from treetune import Action
from treetune.errors import ConfigError, EnvironmentFault
from treetune.sandbox import machines, probe
from treetune.tasksets.shell import environment
from treetune.tasksets.shell.environment import Move, OSInteractionEnvironment, parse
from treetune.tasksets.shell.sample import matches
from treetune.tasksets.shell.taskset import OSInteraction, OSInteractionConfig

COUNT = {"check": [None, {"language": "python", "file": "check/integer-match.py"}], "example": "ls /data | wc -l"}


def samples(tmp_path, *rows, **config):
    path = tmp_path / "samples.json"
    path.write_text(json.dumps(list(rows)))
    return OSInteraction(OSInteractionConfig(data=str(path), **{"command_seconds": 10, **config}))


@pytest.fixture
def system():
    """Machines as users have them: whole systems are looked through, and the next machines start in advance."""
    capability = probe(shell=True)
    if not capability.available:
        pytest.skip(str(capability))
    return capability.launcher


@pytest.fixture
def machine(system, monkeypatch):
    """Machines that cost a tenth of that: one an episode, of whose system only the programs are looked through."""
    monkeypatch.setattr(machines, "ShellPool", partial(machines.ShellPool, size=0))
    programs = environment.CHANGED_SYSTEM.replace("/usr", "/usr/bin")
    monkeypatch.setattr(environment, "CHANGED_SYSTEM", programs)
    return system


def play(taskset, *actions, position=0):
    return asyncio.run(_play(taskset, position, actions))


async def _play(taskset, position, actions):
    episode = taskset.environment(taskset[position])
    steps = []
    try:
        await episode.start()
        for action in actions:
            steps.append(await episode.step(Action.of(action)))
            if steps[-1].done:
                break
    finally:
        await episode.close()
    return steps


def bash(script):
    return f"Think: well.\n\nAct: bash\n\n```bash\n{script}\n```"


# What a policy says


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (bash("ls\npwd"), Move("bash", "ls\npwd")),
        ("```bash\nls\n```", Move("bash", "ls")),
        ("Think: done.\nAct: answer(42)", Move("answer", "42")),
        ("Act: answer(a (b) c)", Move("answer", "a (b) c")),
        ("Act: answer(two\nlines)", Move("answer", "two\nlines")),
        ('**Act:** answer("x").', Move("answer", "x")),
        ("Act: finish", Move("finish")),
        ({"name": "bash_action", "arguments": {"script": "ls"}}, Move("bash", "ls")),
        ({"tool_calls": [{"function": {"name": "answer_action", "arguments": '{"answer": 3}'}}]}, Move("answer", "3")),
        ([{"role": "assistant", "content": "Act: finish"}], Move("finish")),
        ({"name": "finish_action"}, Move("finish")),
    ],
)
def test_what_a_policy_says_is_understood(said, meant):
    assert parse(Action.of(said)) == meant


@pytest.mark.parametrize(
    "said",
    [
        bash("echo a\0b"),
        "Act: answer(\0)",
        {"name": "bash_action", "arguments": {"script": "echo \ud800"}},
        {"tool_calls": 5},
        {"tool_calls": {"function": {}}},
        "",
        "I do not know.",
        "Act: dance",
        "Act: answer",
        "Act: finish\nAct: answer(3)",
        "```bash\nls\n```\n```bash\npwd\n```",
        {"name": "bash_action", "arguments": "{broken"},
        {"name": "bash_action", "arguments": {}},
        {"tool_calls": [{}, {}]},
        [3],
        7,
    ],
)
def test_what_is_no_action_is_said_to_be_none(said):
    assert parse(Action.of(said)).kind == "invalid"


@pytest.mark.parametrize(
    ("matcher", "answer", "reference", "right"),
    [
        ("integer-match", " 42 ", "42\n", True),
        ("integer-match", "042", "42", True),
        ("integer-match", "42.0", "42", False),
        ("integer-match", "", "42", False),
        ("integer-match", "4" * 5000, "42", False),
        ("size-match", "4" * 5000, "42", False),
        ("integer-match", "x", "x", False),
        ("string-match", "a\r\nb ", "a\nb\n", True),
        ("string-match", "A", "a", False),
        ("size-match", "1.2G", "1.2G\n", True),
        ("size-match", "1.2 GB", "1.2G", True),
        ("size-match", "2048K", "2M", True),
        ("size-match", "512 bytes", "512", True),
        ("size-match", "1.2 GB", "1258291K", False),
        ("size-match", "1.25G", "1.2G", False),
        ("size-match", "100M", "104M", False),
        ("size-match", "0", "0", True),
        ("size-match", "4.0K", "4096", True),
        ("size-match", "much", "much", False),
        ("size-match", "1.2", "1.2G", False),
        ("size-match", "0", "1.2G", False),
    ],
)
def test_answers_are_matched(matcher, answer, reference, right):
    assert matches(matcher, answer, reference) is right


# Samples


def test_an_answer_is_compared_with_a_reference(machine, tmp_path):
    row = {
        "description": "How many files?",
        "create": {"init": "mkdir /data; touch /data/{a,b,c}"},
        "evaluation": COUNT,
    }
    taskset = samples(tmp_path, row)
    steps = play(taskset, bash("ls /data"), "Act: answer(3)")
    assert steps[0].observation.content == "a  b  c"
    assert (steps[1].reward, steps[1].done, steps[1].info["success"]) == (1.0, True, True)
    wrong = play(taskset, "Act: answer(4)")[-1]
    assert (wrong.reward, wrong.done, wrong.info["success"]) == (0.0, True, False)
    assert play(taskset, "Act: finish")[-1].reward == 0.0


def test_the_reference_is_taken_before_the_first_action(machine, tmp_path):
    row = {
        "description": "How many files?",
        "create": {"init": "mkdir /data; touch /data/{a,b,c}"},
        "evaluation": COUNT,
    }
    taskset = samples(tmp_path, row)
    assert play(taskset, bash("rm -rf /data; mkdir /data"), "Act: answer(0)")[-1].reward == 0.0
    assert play(taskset, bash("rm -rf /data; mkdir /data"), "Act: answer(3)")[-1].reward == 1.0


@pytest.mark.parametrize("match", ["love", {"answer": "love"}, {"regex": "^lo"}])
def test_an_answer_is_compared_with_a_text(machine, tmp_path, match):
    taskset = samples(tmp_path, {"description": "?", "evaluation": {"match": match}})
    assert play(taskset, "Act: answer( love )")[-1].reward == 1.0
    assert play(taskset, "Act: answer(hate)")[-1].reward == 0.0


def test_the_state_of_the_machine_is_checked_with_the_answer_as_an_argument(machine, tmp_path):
    check = [
        {"language": "python", "code": "import sys; assert sys.argv[1] == 'done'; print('seen', end='')"},
        {"code": '[ "$1" = done ] && [ "$2" = seen ] && [ -f /data/new ]'},
    ]
    row = {"description": "?", "create": {"init": "mkdir /data"}, "evaluation": {"check": check}}
    taskset = samples(tmp_path, row)
    assert play(taskset, "Act: answer(done)")[-1].reward == 0.0
    assert play(taskset, bash("touch /data/new"), "Act: answer(no)")[-1].reward == 0.0
    assert play(taskset, bash("touch /data/new"), "Act: answer(done)")[-1].reward == 1.0


def test_deleting_what_a_check_looks_at_earns_nothing(machine, tmp_path):
    check = {"code": '[ -z "$(find /data -type f ! -perm 600 2>/dev/null)" ]'}
    row = {"description": "?", "create": {"init": "mkdir /data; touch /data/a"}, "evaluation": {"check": check}}
    taskset = samples(tmp_path, row)
    assert play(taskset, "Act: finish")[-1].reward == 0.0
    assert play(taskset, bash("rm -rf /data"), "Act: finish")[-1].reward == 0.0
    assert play(taskset, bash("chmod 600 /data/a"), "Act: finish")[-1].reward == 1.0


FAKE = "printf '#!/bin/sh\\nexit 0\\n'"
STOP = "echo 'import os; os._exit(0)'"


@pytest.mark.parametrize(
    ("language", "mischief"),
    [
        ("bash", f"{FAKE} > /usr/local/bin/bash; chmod +x /usr/local/bin/bash"),
        ("bash", f"rm /usr/bin/bash; {FAKE} > /usr/bin/bash; chmod +x /usr/bin/bash"),
        ("bash", f"{FAKE} > /usr/sbin/grep; chmod +x /usr/sbin/grep"),
        ("bash", f"{FAKE} > /tmp/grep; chmod +x /tmp/grep; export BASH_ENV=/tmp/grep PATH=/tmp:$PATH; alias grep=true"),
        ("python", f"f=$(python3 -m site --user-site); mkdir -p $f; {STOP} > $f/usercustomize.py"),
        ("python", f"for f in /usr/lib/python3*/ /usr/local/lib/python3*/; do {STOP} > $f/sitecustomize.py; done"),
        ("python", f"{STOP} > /root/re.py"),
    ],
)
@pytest.mark.quick_cases(2)
def test_tampering_with_what_checks_run_on_earns_nothing(machine, tmp_path, language, mischief):
    code = {
        "bash": "ls /data | grep -q new",
        "python": "import os, re; assert re.match('new', ''.join(os.listdir('/data')))",
    }
    check = {"language": language, "code": code[language]}
    row = {"description": "?", "create": {"init": "mkdir /data"}, "evaluation": {"check": [check]}}
    assert play(samples(tmp_path, row), bash(mischief), "Act: finish")[-1].reward == 0.0


@pytest.mark.parametrize("language", ["bash", "python"])
def test_what_the_policy_left_running_learns_nothing_of_a_check(machine, tmp_path, language):
    code = {"bash": "sleep 0.5; [ -f /data/x93 ]", "python": "import os, time; time.sleep(0.5); os.stat('/data/x93')"}
    check = {"language": language, "code": code[language]}
    row = {"description": "?", "create": {"init": "mkdir /data"}, "evaluation": {"check": [check]}}
    watch = "for p in /proc/[0-9]*; do f=$(cat $p/cmdline $p/environ | tr -d '\\0' | grep -o '/data/x[0-9]*' | head -1)"
    script = f'(while :; do {watch}; [ -z "$f" ] || touch $f; done; done) >/dev/null 2>&1 &'
    assert play(samples(tmp_path, row), bash(script), "Act: finish")[-1].reward == 0.0


def test_a_program_may_be_made_and_used(machine, tmp_path):
    make = "printf '#!/bin/sh\\necho 42\\n' > /usr/bin/calc; chmod +x /usr/bin/calc; python3 -c 'import json, csv'"
    row = {
        "description": "?",
        "create": {"init": "mkdir /data"},
        "evaluation": {"check": {"code": '[ "$(calc)" = 42 ]'}},
    }
    assert play(samples(tmp_path, row), bash(make), "Act: finish")[-1].reward == 1.0


def test_what_the_task_changed_in_the_system_may_be_changed_and_nothing_else(system, tmp_path):
    if not system.own_users:
        pytest.skip("no other users in the sandbox")
    check = {"code": "[ ! -u /usr/bin/find ]"}
    row = {"description": "?", "create": {"init": "chmod u+s /usr/bin/find"}, "evaluation": {"check": check}}
    assert play(samples(tmp_path, row), bash("chmod u-s /usr/bin/find"), "Act: finish")[-1].reward == 1.0
    assert play(samples(tmp_path, row), bash("chmod u-s /usr/bin/{find,ls}"), "Act: finish")[-1].reward == 0.0


def test_start_leaves_its_variables_and_user_in_the_shell(machine, tmp_path):
    taskset = samples(tmp_path, {"description": "?", "start": "var=3.14; cd /usr", "evaluation": {"match": "no"}})
    assert play(taskset, bash("echo $var $PWD"))[0].observation.content == "3.14 /usr"
    if machine.own_users:
        start = "useradd -m -s /bin/bash jack && su - jack"
        taskset = samples(tmp_path, {"description": "?", "start": start, "evaluation": {"match": "no"}})
        assert play(taskset, bash("whoami"), bash("pwd"))[1].observation.content == "/home/jack"


def test_nothing_done_and_too_many_turns(machine, tmp_path):
    taskset = samples(tmp_path, {"description": "?", "evaluation": {"match": "x"}}, max_turns=2)
    first, second = play(taskset, "hm", "hm")
    assert first.observation.content.startswith("Nothing was done")
    assert (second.done, second.truncated, second.reward) == (True, True, 0.0)


def test_output_is_shortened_and_deadlines_are_told(machine, tmp_path):
    taskset = samples(tmp_path, {"description": "?", "evaluation": {"match": "x"}}, command_seconds=1, output_chars=100)
    long, late, silent, gone = play(taskset, bash("seq 10000"), bash("sleep 100"), bash("true"), bash("exit"))
    assert len(long.observation.content) < 160
    assert "characters left out" in long.observation.content
    assert "stopped after 1 seconds" in late.observation.content
    assert silent.observation.content == "(no output)"
    assert "restarted" in gone.observation.content


def test_a_reference_that_is_not_to_be_had_is_an_error_not_a_reward(machine, tmp_path):
    for example, *facts in (("exit 3", "3"), ("true", "integer"), ("echo many", "integer", "many")):
        taskset = samples(tmp_path, {"description": "?", "evaluation": {**COUNT, "example": example}})
        with raises_code("environment", "example", *facts):
            play(taskset, "Act: answer(0)")


# The machine that the reference is taken on


def referenced(init, example, **more):
    create = {"create": {"init": init}} if init else {}
    evaluation = {"check": [None, {"language": "python", "file": "check/string-match.py"}], "example": example}
    return {"description": "?", **create, "evaluation": evaluation, **more}


async def _play_reference(taskset, position=0):
    """What an episode's own machine says to its example, and what that earns there."""
    episode = taskset.environment(taskset[position])
    try:
        await episode.start()
        example = episode.task.sample.evaluation.example.code
        seen = (await episode.step(Action.of(bash(example)))).observation.content
        return seen, (await episode.step(Action.of(f"Act: answer({seen})"))).reward
    finally:
        await episode.close()


def test_a_machine_that_was_made_at_random_has_its_own_reference(machine, tmp_path):
    init = "shuf -i 0-999999 -n 20 > /root/numbers; echo $RANDOM$RANDOM > /usr/share/drawn; mkdir /srv/$RANDOM"
    taskset = samples(tmp_path, referenced(init, "md5sum /root/numbers; cat /usr/share/drawn; ls /srv"))
    first, second = (asyncio.run(_play_reference(taskset)) for _ in range(2))
    assert first[0] != second[0]
    assert (first[1], second[1]) == (1.0, 1.0)


LEAVES = """
tar -xf /root/data.tar -C /root
echo 42 > /root/answer; echo 42 > /tmp/answer; echo 42 > /usr/share/answer; echo 42 > /dev/shm/answer
touch /var/tmp/left; rm /root/old; echo changed > /root/kept; useradd jill; sed -i s/x/y/ /etc/environment
(sleep 1000 &) ; echo export ANSWER=42 >> /root/.bashrc; history -s answer 42; cat /root/part/* | wc -l
"""
LOOK = """
find /root /tmp /var/tmp /dev/shm /srv /home -mindepth 1 | sort | xargs; cat /root/kept
ls /usr/share/answer 2>/dev/null; grep -c jill /etc/passwd; pgrep sleep; env | grep -i answer; history | grep answer
find / -xdev -newer /root/made ! -path '/proc/*' ! -type d 2>/dev/null; true
"""
"""What a policy would look for that wants to be told the answer."""


def test_what_takes_the_reference_leaves_nothing_on_the_policys_machine(machine, tmp_path):
    init = (
        "cd /root; mkdir part; seq 30 > part/a; seq 12 > part/b; tar -cf data.tar part; rm -r part; echo old > old;"
        "echo kept > kept; sleep 0.02; touch made"
    )
    row = referenced(init, LEAVES)
    look, end = play(samples(tmp_path, row), bash(LOOK), "Act: answer(42)")
    assert look.observation.content == "/root/data.tar /root/kept /root/made /root/old\nkept\n0"
    assert end.reward == 1.0
    nothing = play(samples(tmp_path, {**row, "evaluation": {"match": "x"}}), bash(LOOK))[0]
    assert nothing.observation.content == look.observation.content


def test_a_reference_is_taken_once_an_episode_and_ends_with_its_machine(machine, tmp_path):
    row = referenced("echo 1 > /root/n", "n=$(cat /root/n); echo $((n + 1)) | tee /root/n")
    taskset = samples(tmp_path, row)
    steps = play(taskset, bash("cat /root/n; echo 7 > /root/n"), "Act: answer(2)")
    assert (steps[0].observation.content, steps[1].reward) == ("1", 1.0)


def test_a_reference_sees_what_start_did(machine, tmp_path):
    row = referenced("mkdir /data", "ls /data", start="touch /data/made; cd /data; x=3")
    assert play(samples(tmp_path, row), bash("pwd; echo $x"), "Act: answer(made)")[-1].reward == 1.0


def test_a_reference_sees_the_shell_that_every_machine_has(machine, tmp_path):
    taskset = samples(tmp_path, referenced(None, "ps -eo args= | grep -c '^bash --login'"))
    assert asyncio.run(_play_reference(taskset)) == ("1", 1.0)


@pytest.mark.parametrize("script", ["init", "start"])
def test_a_reference_that_would_miss_running_processes_is_not_taken(machine, tmp_path, script):
    both_run = "until [ $(pgrep -xc sleep) = 2 ]; do :; done"  # before, they may still be the shell that forks them
    left = f"sleep 1234 >/dev/null 2>&1 & sleep 1235 >/dev/null 2>&1 & {both_run}"
    row = referenced(left if script == "init" else None, "pgrep sleep | wc -l")
    row |= {"start": left} if script == "start" else {}
    with raises_code("environment", "2 processes", "sleep 1235"):
        play(samples(tmp_path, row))
    fine = samples(tmp_path, {**row, "evaluation": {"match": "2"}})
    assert play(fine, bash("pgrep sleep | wc -l"), "Act: answer(2)")[0].observation.content == "2"


@pytest.mark.parametrize(
    ("init", "facts"),
    [
        ("echo made; echo broken >&2; exit 7", ("with 7", "made\nbroken")),
        ("echo before; sleep 1000", ("timeout", "before")),
        (["true", {"language": "python", "code": "raise ValueError('no data')"}], ("with 1", "no data")),
        ("kill -9 $$", ("137",)),
    ],
)
def test_an_init_that_fails_or_hangs_is_an_invalid_sample_with_its_output(machine, tmp_path, init, facts):
    taskset = samples(tmp_path, referenced(init, "echo 1"), setup_seconds=0.5)
    with raises_code("environment", "init script", *facts):
        play(taskset, "Act: answer(1)")


def test_a_start_that_fails_is_an_invalid_sample(machine, tmp_path):
    taskset = samples(tmp_path, {"description": "?", "start": "cd /nowhere", "evaluation": {"match": "x"}})
    with raises_code("environment", "start script", "with 1", "/nowhere"):
        play(taskset)


def test_invalid_samples_are_told_by_validate_and_have_no_reward(machine, tmp_path, treetune):
    rows = [referenced("echo oh no >&2; exit 3", "echo 1"), referenced("true", "echo 1")]
    (tmp_path / "samples.json").write_text(json.dumps(rows))
    checked = treetune("validate", "os-interaction", "--taskset.data", "samples.json", "--json")
    assert (checked.code, checked.json["valid"], checked.json["invalid"]) == (1, 1, 1)
    assert "oh no" in checked.json["findings"][0]["found"]
    result = treetune("eval", "os-interaction", "--taskset.data", "samples.json", "-m", "scripted:echo", "--json")
    assert result.json["outcomes"] == {"environment_error": 1, "truncated": 1}, result.json


def test_scripts_are_found_under_their_root(machine, tmp_path):
    row = {"description": "?", "create": {"init": {"file": "init/make.sh"}}, "evaluation": COUNT}
    with raises_code("environment", "init/make.sh"):
        play(samples(tmp_path, row))
    script = tmp_path / "scripts" / "samples" / "init" / "make.sh"
    script.parent.mkdir(parents=True)
    script.write_text("mkdir /data; touch /data/{a,b}")
    taskset = samples(tmp_path, row, scripts_root=str(tmp_path / "scripts"))
    assert play(taskset, "Act: answer(2)")[-1].reward == 1.0


def test_a_script_outside_of_the_root_is_not_read(tmp_path):
    (tmp_path / "secret.sh").write_text("echo secret")
    (tmp_path / "scripts").mkdir()
    row = {"description": "?", "create": {"init": {"file": "../secret.sh"}}, "evaluation": COUNT}
    assert samples(tmp_path, row, scripts_root=str(tmp_path / "scripts"))[0].sample.refusal is not None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"description": "?", "create": {"local": "packages"}, "evaluation": COUNT}, "packages"),
        ({"description": "?", "evaluation": {}}, "no evaluation"),
        ({"description": "?", "evaluation": {"check": [None]}}, "no example"),
        ({"description": "?", "evaluation": {"check": {"language": "c++", "code": ""}}}, r"c\+\+"),
    ],
)
def test_what_cannot_be_served_says_why_or_is_left_out(tmp_path, row, reason):
    fine = {"description": "fine", "evaluation": {"match": "x"}}
    taskset = samples(tmp_path, row, fine)
    with pytest.raises(EnvironmentFault, match=reason):
        asyncio.run(taskset.environment(taskset[0]).start())
    with pytest.warns(UserWarning, match=reason):
        assert samples(tmp_path, row, fine, unsupported="skip").count() == 1


@pytest.mark.parametrize("content", ["{", "[3]", '[{"evaluation": {}}]', "[]"])
def test_data_that_are_no_samples_are_refused(tmp_path, content):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ConfigError):
        OSInteraction(OSInteractionConfig(data=str(tmp_path / "bad.json")))


def test_a_json_file_directly_in_the_folder_is_read(tmp_path):
    row = {"description": "one", "evaluation": {"match": "1"}}
    (tmp_path / "mine.json").write_text(json.dumps([row]))
    taskset = OSInteraction(OSInteractionConfig(data=str(tmp_path)))
    assert [taskset[0].sample.description, taskset[0].extra_info["name"]] == ["one", "mine.json:0"]
    # In AgentBench's own folder the samples are in folders, and a file beside them is none of them.
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "a.json").write_text(json.dumps([{**row, "description": "two"}]))
    taskset = OSInteraction(OSInteractionConfig(data=str(tmp_path)))
    assert [task.sample.description for task in taskset.draw()] == ["two"]


def test_a_folder_without_json_files_says_so(tmp_path):
    with raises_code("config", "JSON"):
        OSInteraction(OSInteractionConfig(data=str(tmp_path)))


def test_gold_answers_earn_the_reward(machine, tmp_path):
    made = {"description": "?", "create": {"init": "mkdir /data; touch /data/{a,b}"}, "evaluation": COUNT}
    done = {
        "description": "?",
        "create": {"init": "mkdir /data"},
        "evaluation": {"check": {"code": "[ -f /data/new ] && [ $1 = yes ]"}, "example": "touch /data/new && echo yes"},
    }
    taskset = samples(tmp_path, made, done, {"description": "?", "evaluation": {"match": "x"}})
    for position in range(3):
        gold = asyncio.run(taskset.gold(taskset[position]))
        assert play(taskset, *gold, position=position)[-1].reward == 1.0


@pytest.mark.thorough
def test_it_is_evaluated_from_the_command_line(system, tmp_path, treetune):
    rows = [{"description": "?", "create": {"init": "mkdir /data; touch /data/a"}, "evaluation": COUNT}] * 2
    (tmp_path / "samples.json").write_text(json.dumps(rows))
    result = treetune(
        "eval", "os-interaction", "--taskset.data", "samples.json", "-m", "scripted:gold", "-r", "2", "--json"
    )
    assert result.code == 0, result.err
    assert result.json["mean_reward"] == 1.0


def test_closing_twice_and_before_a_start_is_fine(tmp_path):
    taskset = samples(tmp_path, {"description": "?", "evaluation": {"match": "x"}})

    async def closed():
        episode = OSInteractionEnvironment(taskset[0])
        await episode.close()
        await episode.close()

    asyncio.run(closed())
