"""`treetune list --matrix`: every cell that says yes works, and every no says what the matrix says.

What a server can be asked is tried in `test_serve_eval.py`, and the columns of trainers with the real ones.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from kinds import KINDS, TARGETS, write_targets
from serve_process import serve

from conftest import ROOT
from treetune.cli.listing import TargetKind, TaskKind, as_text, cells
from treetune.episode import Episode
from treetune.rows.reading import read_rows
from treetune.serve.host import ModelsConfig
from treetune.serve.http import HttpConfig
from treetune.serve.http.client import TaskServerClient
from treetune.serve.http.door import HttpDoor
from treetune.serve.openenv.door import OpenEnvDoor
from treetune.serve.server import EnvServer
from treetune.serve.zmq.client import EnvClient
from treetune.serve.zmq.door import ZmqDoor
from treetune.target import load_taskset

VERBS = {"show", "validate", "audit", "eval", "profile", "build verl", "build skyrl", "build trl", "convert", "train"}
DOORS = {"serve"}
"""Both: what one takes, the other takes."""
PROTOCOLS = {"OpenEnv", "ORS"}
FOREIGN = {TargetKind.OPENENV: "openenv", TargetKind.ORS: "ors"}
"""Environments of other servers; here of ours, of theirs in `test_openenv_real.py`."""
TRAINERS = {"verl", "SkyRL", "AReaL", "TRL", "TRL async", "slime", "verifiers"}
"""What takes these kinds is tried in the tests of each trainer, with the real one (slime: recorded calls of it)."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_targets(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def command(verb: str, target: str, endless: bool = False) -> list[str]:
    verb, *format = verb.split()
    number = ["-n", "3"] if endless else []
    return {
        "show": ["show", target, "-n", "3", "--json"],
        "validate": ["validate", target, *number, "--json"],
        "audit": [
            "audit",
            target,
            "-n",
            "3",
            "--skip",
            "tasks-differ,reward-differs,observations-differ,not-portable",
            "--json",
        ],
        "eval": ["eval", target, "-m", "scripted:gold", *number, "--json"],
        "profile": ["profile", target, "-m", "scripted:gold", "-r", "2", "-o", "rates.jsonl", *number, "--json"],
        "build": ["build", target, "--format", *format, *number, "--json"],
        "convert": ["convert", target, "out.parquet", "--to", "verl", "--force", *number, "--json"],
        "serve": ["serve", target, "--http", "127.0.0.1:0"],
        "train": ["train", "verl", target, *number, "--dry-run", "--json"],
    }[verb]


def test_every_cell_is_one_that_is_tried():
    found = cells()
    assert all(set(row) == VERBS | DOORS for row in found["target"].values())
    assert all(set(row) == {"eval", *DOORS, *PROTOCOLS, *TRAINERS} for row in found["task"].values())
    # An environment of verifiers is tried in `test_verifiers_targets.py`, where verifiers is installed.
    elsewhere = {TargetKind.SERVER, TargetKind.VERIFIERS, *FOREIGN}
    assert TARGETS.keys() | elsewhere == set(TargetKind)
    assert KINDS.keys() == set(TaskKind)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_works_in_every_verb_that_says_yes(folder, treetune, target):
    name, endless = TARGETS[target]
    for verb in VERBS:
        assert cells()["target"][target][verb] is True
        result = treetune(*command(verb, name, endless))
        assert result.code == 0, (verb, result.err, result.out)
        if verb == "show":
            assert len(result.json["tasks"]) == 3
        elif verb == "eval":
            assert result.json["mean_reward"] == 1.0
        elif verb == "profile":
            assert result.json["models"][0]["all_1"] == 1.0
        elif verb == "convert":
            assert result.json["rows"] >= 3
        elif verb == "audit":
            assert len(result.json["tasks"]) == 3
        elif verb == "train":  # the others: tests/cli/test_train.py, where a server is tried too
            assert result.json["data"]["train"]
        elif verb != "validate":
            assert result.json["tasks"][0]["rows"] >= 3


@asynccontextmanager
async def served(target: str):
    """A server with both doors."""
    pull, http = ZmqDoor("tcp://127.0.0.1:0"), HttpDoor(HttpConfig(address="127.0.0.1:0"))
    server = EnvServer(load_taskset(target), models=ModelsConfig(model="scripted:gold"), doors=[pull, http])
    await server.start()
    try:
        async with EnvClient(pull.address) as client, TaskServerClient(http.address) as episodes:
            yield client, episodes
    finally:
        await server.close()


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_served_at_both_doors(folder, target):
    assert all(cells()["target"][target][door] is True for door in DOORS)

    async def play():
        async with served(TARGETS[target][0]) as (client, episodes):
            trace = await client.run_rollout(await client.sample())
            async with await episodes.start() as episode:
                assert episode.observation.messages()
            return trace.reward

    assert asyncio.run(play()) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_task_is_played_by_eval_and_both_servers(folder, treetune, kind):
    assert all(cells()["task"][kind][place] is True for place in ("eval", *DOORS))
    target, actions = KINDS[kind]

    async def play():
        async with served(target) as (client, episodes):
            trace = await client.run_rollout(await client.sample(0))
            async with await episodes.start(0) as episode:
                steps = [await episode.step(action) for action in actions]
            assert steps[-1].done
            return trace.reward, sum(step.reward for step in steps)

    assert asyncio.run(play()) == (1.0, 1.0)
    assert treetune("eval", target, "-m", "scripted:gold", "--json").json["mean_reward"] == 1.0
    assert treetune("eval", target, "-m", "scripted:echo", "--json").json["mean_reward"] == 0.0


ROWS = {verb for verb in VERBS if verb.split()[0] in ("build", "train")}
DOUBLES = """
class Doubles:
    async def complete(self, request):
        return str(2 * int(request.messages[-1]["content"].split()[1].strip(".")))
"""


@pytest.mark.parametrize("target", FOREIGN)
def test_an_environment_of_openenv_or_ors_works_in_every_verb_that_says_yes(folder, treetune, target):
    (folder / "policy.py").write_text(DOUBLES)
    with serve(folder, TARGETS[TargetKind.PYTHON][0], "--openenv", ":0") as server:
        name = f"{FOREIGN[target]}:{server.report['openenv']}"
        refused = treetune(*command("convert", name))
        assert refused.code != 0
        assert cells()["target"][target]["convert"] in refused.err
        (folder / "there.yaml").write_text(f"taskset: {{id: '{name}', prompts: true}}")
        assert treetune(*command("convert", "there.yaml")).json["rows"] == 4
        for verb in VERBS - {"convert"}:
            assert cells()["target"][target][verb] is True
            asked = ["scripted:policy.py:Doubles" if one == "scripted:gold" else one for one in command(verb, name)]
            rows = ("--taskset.prompts", "true") if verb in ROWS else ()
            result = treetune(*asked, *rows)
            assert result.code == 0 or (verb == "audit" and result.json["tasks"]), (verb, result.err, result.out)
            if verb == "show":
                assert result.json["tasks"][1]["prompt"] == [{"role": "user", "content": "Double 1."}]
            elif verb == "eval":
                assert (result.json["mean_reward"], result.json["scored"]) == (1.0, 4)
            elif verb == "profile":
                assert result.json["models"][0]["all_1"] == 1.0
        with serve(folder, name, "--http", ":0") as again:
            evaluated = treetune("eval", again.report["http"], "-m", "scripted:policy.py:Doubles", "--json")
            assert evaluated.json["mean_reward"] == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_task_is_played_over_openenv_and_ors(folder, kind):
    assert all(cells()["task"][kind][protocol] is True for protocol in PROTOCOLS)
    target, actions = KINDS[kind]

    async def play():
        door = OpenEnvDoor(HttpConfig(address="127.0.0.1:0"))
        server = EnvServer(load_taskset(target), doors=[door])
        await server.start()
        try:
            return [await _play(f"{prefix}:{door.address}", actions) for prefix in FOREIGN.values()]
        finally:
            await server.close()

    assert asyncio.run(play()) == [1.0, 1.0]


async def _play(target: str, actions: list) -> float:
    taskset = await asyncio.to_thread(load_taskset, target)  # which asks the server, and that is on this loop
    episode = await Episode.start(taskset, taskset[0])
    for action in actions:
        last = await episode.step(action)
    assert last.done
    return episode.result.reward


def test_what_a_server_cannot_be_asked_is_told(treetune):
    for verb in VERBS | DOORS:
        said = cells()["target"][TargetKind.SERVER][verb]
        if said is not True:
            result = treetune(*command(verb, "http://127.0.0.1:1"))
            assert (result.code, said in result.err) == (2, True), (verb, result.err)


def test_only_images_are_refused_by_a_trainer():
    found = cells()["task"]
    refused = {(kind, place) for kind in found for place, said in found[kind].items() if said is not True}
    assert refused == {(TaskKind.IMAGES, trainer) for trainer in ("AReaL", "TRL async", "slime")}


@pytest.mark.parametrize("kind", [TaskKind.MULTI_TURN, TaskKind.TOOLS])
def test_rows_for_verl_name_an_agent_loop_where_one_answer_is_not_all(folder, treetune, kind):
    built = treetune(*command("build verl", KINDS[kind][0])).json
    assert {row["agent_name"] for row in read_rows(built["train_files"][0])} == {"treetune"}
    assert "agent_loop_config_path" in built["overrides"][0]


def test_the_docs_show_what_the_command_prints(treetune):
    printed = treetune("list", "--matrix")
    assert printed.out.strip() == as_text()
    assert as_text() in (ROOT / "docs" / "tasksets.md").read_text()
    assert treetune("list", "--matrix", "--json").json == cells()
