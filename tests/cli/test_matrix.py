"""`treetune list --matrix`: every cell that says yes works, and every no says what the matrix says.

What a server can be asked is tried in `test_serve_eval.py`, environments of verifiers in `test_verifiers_targets.py`,
and the columns of trainers with the real ones; judges in the rows of trainers in `judges/test_elsewhere.py`.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import islice

import doors
import paid_turns
import pytest
from chat_templates import Letters, forgets_thoughts
from command_line import ROOT
from kinds import CONTRACTS, KINDS, TARGETS, write_targets
from serve_process import serve

from treetune import Contract, run_rollout
from treetune.chat.tokens import ChatTokens, Tokens
from treetune.cli.listing import TRAINERS, ContractKind, TargetKind, TaskKind, as_text, cells
from treetune.core.policy import Completion, Policy
from treetune.data.rows.reading import read_rows
from treetune.models.scripted import Replay
from treetune.play.host import LocalHost
from treetune.serve.errors import ServeError
from treetune.serve.host import ModelsConfig
from treetune.serve.http import HttpConfig
from treetune.serve.http.client import TaskServerClient
from treetune.serve.http.routes import HttpDoor
from treetune.serve.server import EnvServer
from treetune.serve.zmq.client import EnvClient
from treetune.serve.zmq.door import ZmqDoor
from treetune.tasksets.target import load_taskset

VERBS = {
    "show",
    "validate",
    "audit",
    "eval",
    "profile",
    "build verl",
    "build skyrl",
    "build trl",
    "convert",
    "train",
    "export",
}
FOREIGN = {TargetKind.OPENENV: "openenv", TargetKind.ORS: "ors"}
COUNTS = """
class Counts:
    async def complete(self, request):
        return str(2 - request.turn)
"""


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
        "export": ["export", "verifiers", target, "--to", "exported", "--force", "--json"],
    }[verb]


def test_every_cell_is_one_that_is_tried():
    found = cells()
    assert all(set(row) == VERBS | {"serve"} for row in found["target"].values())
    # Each of the trainers' columns is tried in the tests of that trainer, with the real one (slime: recorded calls).
    for table in ("task", "contract"):
        assert all(set(row) == {"eval", *doors.DOORS, *TRAINERS} for row in found[table].values())
    assert TARGETS.keys() | FOREIGN.keys() | {TargetKind.SERVER, TargetKind.VERIFIERS} == set(TargetKind)
    assert KINDS.keys() == set(TaskKind)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.quick_cases(3)
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
        elif verb == "export":  # what becomes of it: tests/trainers/test_verifiers_export.py
            assert result.json["infinite"] is endless
        elif verb == "train":  # the others: tests/cli/test_train.py, where a server is tried too
            assert result.json["data"]["train"]
        elif verb != "validate":
            assert result.json["tasks"][0]["rows"] >= 3


@asynccontextmanager
async def served(target: str, agent: str | None = None):
    """A server with both doors."""
    pull, http = ZmqDoor("tcp://127.0.0.1:0"), HttpDoor(HttpConfig(address="127.0.0.1:0"))
    server = EnvServer(
        load_taskset(target), models=ModelsConfig(model="scripted:gold", agent=agent), doors=[pull, http]
    )
    await server.start()
    try:
        async with EnvClient(pull.address) as client, TaskServerClient(http.address) as episodes:
            yield client, episodes
    finally:
        await server.close()


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_served_at_both_doors(folder, target):
    assert cells()["target"][target]["serve"] is True

    async def play():
        async with served(TARGETS[target][0]) as (client, episodes):
            trace = await client.run_rollout(await client.sample())
            async with await episodes.start() as episode:
                assert episode.observation.messages()
            return trace.reward

    assert asyncio.run(play()) == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick_cases(1)
def test_a_kind_of_task_is_played_by_eval_and_over_every_protocol(folder, treetune, kind):
    assert all(cells()["task"][kind][place] is True for place in ("eval", *doors.DOORS))
    target, actions = KINDS[kind]

    async def play():
        async with served(target) as (client, _):
            return (await client.run_rollout(await client.sample(0))).reward

    assert asyncio.run(play()) == 1.0
    for door in doors.DOORS:
        assert sum(doors.play(door, target, 0, actions)) == 1.0, door
    assert treetune("eval", target, "-m", "scripted:gold", "--json").json["mean_reward"] == 1.0
    assert treetune("eval", target, "-m", "scripted:echo", "--json").json["mean_reward"] == 0.0


@pytest.fixture
def other_server(folder):
    """Speaks OpenEnv and ORS, in a process of its own."""
    (folder / "counts.py").write_text(COUNTS)
    with serve(folder, "kinds_of.py:Countdowns", "--openenv", "127.0.0.1:0") as server:
        yield server.report["openenv"]


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.quick_cases(1)
def test_environments_of_other_servers_work_in_every_verb_that_says_yes(other_server, treetune, kind):
    target = f"{FOREIGN[kind]}:{other_server}"
    for verb in VERBS:
        said = cells()["target"][kind][verb]
        result = treetune(
            *[word if word != "scripted:gold" else "scripted:counts.py:Counts" for word in command(verb, target)]
        )
        if said is not True:
            assert result.code in (2, 3), (verb, result.out)
            assert said in result.err
            continue
        assert result.code == 0, (verb, result.err, result.out)
        if verb == "eval":
            assert result.json["mean_reward"] == 1.0
        elif verb == "train":
            assert result.json["data"]["train"]
        elif verb.startswith("build"):
            assert result.json["tasks"][0]["rows"] == 2
    assert cells()["target"][kind]["serve"] is True
    assert sum(doors.play("HTTP", target, 1, ["2", "1"])) == 1.0


def test_an_environment_of_verifiers_is_not_exported_to_it(treetune):
    result = treetune(*command("export", "verifiers:mine"))
    assert (result.code, cells()["target"][TargetKind.VERIFIERS]["export"] in result.err) == (2, True), result.err


def test_what_a_server_cannot_be_asked_is_told(treetune):
    for verb in VERBS | {"serve"}:
        said = cells()["target"][TargetKind.SERVER][verb]
        if said is not True:
            result = treetune(*command(verb, "http://127.0.0.1:1"))
            assert (result.code, said in result.err) == (2, True), (verb, result.err)


@pytest.fixture
def contracts(folder):
    (folder / "contracts_of.py").write_text(CONTRACTS)
    return folder


def cells_of(kind):
    return {place for place, cell in cells()["contract"][kind].items() if cell is True}


PLACES = ("eval", *doors.DOORS)


def play_here(target, said):
    taskset = load_taskset(target)
    policy = Replay([Completion(text=text) for text in said])
    return asyncio.run(run_rollout(taskset, taskset[0], policy))


def test_an_episode_of_more_than_ten_turns_pays_each_of_them_everywhere(contracts):
    assert {*PLACES} <= cells_of(ContractKind.MANY_TURNS) & cells_of(ContractKind.TURN_REWARDS)
    said = ["up", "no", *["up"] * 10]
    paid = [float(word == "up") for word in said]
    for door in doors.DOORS:
        assert doors.play(door, "contracts_of.py:Climbs", 0, said) == paid, door
    trace = play_here("contracts_of.py:Climbs", said)
    assert ([turn.reward for turn in trace.turns], trace.outcome) == (paid, "truncated")


@pytest.mark.parametrize("rewrites", ["keep", "split"])
def test_a_rollout_counts_once_and_turns_keep_their_rewards_where_nothing_is_trained(contracts, rewrites):
    """Also a rollout of several sequences, whose chat template rewrites history."""
    assert cells_of(ContractKind.ONCE) == {*PLACES, *TRAINERS}
    assert cells_of(ContractKind.TURN_CREDIT) == {*PLACES, *TRAINERS} - {"verifiers"}
    tokenizer = Letters(forgets_thoughts)
    chat = ChatTokens(tokenizer, rewrites=rewrites)

    class Thinks(Policy):
        name = "thinks"

        async def complete(self, request):
            text = ("<think>hm</think>up", "up", "no")[min(request.turn, 2)]
            prompt = chat.next_prompt(request.messages, request.tokens or Tokens())
            ids = [*(token for letter in text for token in tokenizer(letter)["input_ids"]), tokenizer.eos_token_id]
            message = chat.read(prompt, ids, request.turn)
            return Completion(text, message, "stop", None, prompt.ids, ids, [-1.0] * len(ids), prompt)

    async def play():
        host = await LocalHost.open(load_taskset("contracts_of.py:Climbs"), lambda *_: Thinks())
        return await host.run_group(await host.sample(0), 2)

    traces = asyncio.run(play())
    assert [len(trace.tokens.sequences) for trace in traces] == [1 + (rewrites == "split")] * 2
    paid = [0.0, 1.0, *[0.0] * 10]
    assert [[turn.reward for turn in trace.turns] for trace in traces] == [paid, paid]
    assert [trace.reward for trace in traces] == [1.0, 1.0]
    spans = [span.turn for sequence in traces[0].tokens.sequences for span in sequence.spans]
    assert spans == list(range(12))


def test_credit_by_turn_is_refused_where_an_episode_has_one_advantage(folder, treetune):
    paid_turns.write(folder)
    said = cells()["contract"][ContractKind.TURN_CREDIT]["verifiers"]
    result = treetune(*command("export", "paid_turns_tasks.py:ByTurn"))
    assert (result.code, said in result.err) == (2, True), result.err
    assert treetune(*command("export", "paid_turns_tasks.py:ByOutcome")).code == 0


def test_the_discount_is_in_traces_and_is_declared_by_the_doors_that_have_a_field_for_it(contracts):
    assert {"eval", "ZMQ", "HTTP"} == {place for place in cells_of(ContractKind.DISCOUNT) if place not in TRAINERS}
    trace = play_here("contracts_of.py:Climbs", ["up"] * 12)
    assert (trace.reward, trace.shaped_reward) == (12.0, 12.0 * 0.5**12)

    async def ask():
        async with served("contracts_of.py:Climbs") as (client, episodes):
            async with await episodes.start(0) as episode:
                declared = episode.contract
            return declared, (await client.start(await client.sample(0))).contract, await episodes.info()

    over_http, over_zmq, info = asyncio.run(ask())
    assert over_http == over_zmq == Contract(max_turns=12, turn_discount=0.5).resolved
    assert (info["contract"]["max_turns"], info["contract"]["turn_discount"]) == (12, 0.5)


def test_metrics_are_in_traces_and_in_the_steps_of_each_door(contracts):
    assert {*PLACES} <= cells_of(ContractKind.METRICS)
    assert play_here("contracts_of.py:Climbs", ["up"] * 12).metrics == {"steps": 12.0}

    async def ask():
        async with served("contracts_of.py:Climbs") as (client, episodes):
            started = await client.start(await client.sample(0))
            pulled = await client.step(started.episode, "up", 0)
            async with await episodes.start(0) as episode:
                return pulled.info, (await episode.step("up")).info

    assert asyncio.run(ask()) == ({"metrics": {"steps": 1}}, {"metrics": {"steps": 1}})


def test_groups_are_scored_by_eval_and_pulled_groups_and_refused_or_warned_of_elsewhere(contracts, treetune):
    assert {"eval", "ZMQ"} == {place for place in cells_of(ContractKind.GROUP_SCORE) if place not in TRAINERS}
    only = "contracts_of.py:OnlyTogether"
    assert treetune("eval", only, "-m", "scripted:echo", "-r", "2", "--json").json["mean_reward"] == 0.5

    async def play():
        async with served(only) as (client, episodes):
            with pytest.raises(ServeError, match=cells()["contract"][ContractKind.GROUP_SCORE]["HTTP"]):
                await episodes.start(0)
            return [trace.reward for trace in await client.run_group(await client.sample(0), 2)]

    assert asyncio.run(play()) == [0.5, 0.5]
    for verb, place in (("build skyrl", "SkyRL"), ("export", "verifiers")):
        result = treetune(*command(verb, only))
        said = cells()["contract"][ContractKind.GROUP_SCORE][place]
        assert (result.code, said in result.err) == (2, True), (verb, result.err)
    assert said in treetune(*command("build skyrl", "contracts_of.py:Together")).err
    assert treetune(*command("build verl", only)).code == 0


def test_the_sources_of_a_mixture_are_drawn_by_weight_everywhere(folder, treetune):
    assert cells_of(ContractKind.WEIGHTS) == {*PLACES, *TRAINERS}
    (folder / "weights.yaml").write_text(
        "taskset: {id: mixture, sources: [{id: reverse-text}, {id: arithmetic, weight: 3}], shuffle: {seed: 1}}\n"
    )
    drawn = [task.data_source for task in islice(load_taskset("weights.yaml").draw(40), 40)]
    assert 26 <= drawn.count("arithmetic") <= 34

    async def ask():
        async with served("weights.yaml") as (client, episodes):
            pulled = [(await client.sample(index)).data_source for index in range(40)]
            stepped = []
            for index in range(40):
                async with await episodes.start(index) as episode:
                    stepped.append(episode.info["data_source"])
            return pulled, stepped

    assert asyncio.run(ask()) == (drawn, drawn)
    for format in ("verl", "skyrl", "trl"):
        built = treetune("build", "weights.yaml", "--format", format, "-n", "40", "--json").json
        assert [row["data_source"] for row in read_rows(built["train_files"][0])] == drawn, format


AGENT = """
async def play(task, client):
    return (await client.chat([{"role": "user", "content": task.problem}]))["content"]
"""


def test_agents_play_where_the_matrix_says_and_are_refused_by_name_elsewhere(folder, treetune):
    """Trainers that have them play: test_agents_in_trainers.py, test_slime.py."""
    (folder / "mine.py").write_text(AGENT)
    assert cells_of(ContractKind.AGENTS) == {"eval", "ZMQ", *TRAINERS} - {"SkyRL", "verifiers"}
    target, agent = KINDS[TaskKind.REWARD][0], "mine.py:play"
    found = treetune("eval", target, "--agent", agent, "-m", "scripted:gold", "--json")
    assert found.json["mean_reward"] == 1.0

    async def ask():
        async with served(target, agent) as (client, _):
            return await client.run_rollout(await client.sample(0))

    trace = asyncio.run(ask())
    assert (trace.reward, trace.agent.name) == (1.0, agent)
    (folder / "with_agent.yaml").write_text(f"agent: {agent}\ntaskset: {{id: 'kinds_of.py:Doubles'}}\n")
    refused = cells()["contract"][ContractKind.AGENTS]
    assert refused["SkyRL"] in treetune("train", "skyrl", target, f"agent={agent}", "--dry-run").err
    assert refused["verifiers"] in treetune(*command("export", "with_agent.yaml")).err


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
