"""`treetune train`: what is planned for each trainer, and what becomes of the command. The trainers themselves are
tried in tests/trainers/test_cpu_training.py and in the tests of each."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from kinds import CONTRACTS, write_targets
from omegaconf import OmegaConf
from raising import raises_code

from treetune.core.contract import SCORED_ALONE
from treetune.trainers import launch
from treetune.trainers.areal.__main__ import make_rows, read_arguments, serve
from treetune.trainers.launch import TRAINERS, Launch, Setting, TrainRequest, as_text, merge, plan
from treetune.trainers.verl import DEFAULT_LOOP, LOOPS
from treetune.trainers.verl.several_rows import MODE, MODULES


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_targets(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def stand_in(monkeypatch):
    """A trainer that is nothing but a line of Python: what is looked at is how it is started, and how it ends."""

    def stand(code: str, package: str = "treetune") -> None:
        def plan(request, run, tasks):
            return Launch(
                trainer="line",
                package=package,
                install="pip install line",
                data={},
                config={},
                command=[sys.executable, "-c", code],
                environment={"GREETING": "hello"},
                run=run,
                checkpoints="checkpoints/*",
                saved="checkpoints/{step}",
            )

        monkeypatch.setattr(launch, "plan_of_line", plan, raising=False)
        monkeypatch.setitem(TRAINERS, "line", "treetune.trainers.launch:plan_of_line")

    return stand


def test_a_dry_run_builds_the_data_and_starts_nothing(folder, treetune):
    result = treetune("train", "skyrl", "kinds_of.py:Doubles", "--dry-run", "--steps", "3", "--model", "M", "--json")
    assert result.code == 0, result.err
    told = result.json
    assert told["trainer"] == "skyrl"
    (file,) = told["data"]["train"]
    assert pq.read_metadata(file).num_rows == 4
    assert told["config"]["trainer.max_training_steps"] == "3"
    assert told["config"]["trainer.policy.model.path"] == "M"
    assert told["config"]["trainer.train_batch_size"] == "4"  # of a larger batch nothing would be trained
    assert told["command"][1:3] == ["-m", "treetune.trainers.skyrl"]
    assert f"tasks={file}" in told["command"]


@pytest.mark.parametrize(
    ("target", "turns"),
    [
        (["kinds_of.py:Doubles"], None),
        (["environments.jsonl"], None),
        (["kinds_of.py:Countdowns"], "256"),  # it does not say how many
        (["kinds_of.py:Doubled"], "256"),
        (["conversations.jsonl"], "5"),
        (["long.jsonl"], "9"),
        (["kinds_of.py:Countdowns", "generator.max_turns=3"], "3"),
    ],
)
def test_skyrl_allows_as_many_turns_as_the_episodes_may_have(folder, treetune, target, turns):
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_spec": {"method": "rule", "ground_truth": "2"}}
    single, several = {**row, "env_class": "gsm8k"}, {**row, "env_class": "gsm8k_multi_turn"}
    for name, rows in {
        "conversations.jsonl": [single, several],
        "long.jsonl": [single, several, {**several, "extra_info": {"max_turns": 9}}],
    }.items():
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in rows))
    result = treetune("train", "skyrl", *target, "--dry-run", "--json")
    assert result.code == 0, result.err
    assert result.json["config"].get("generator.max_turns") == turns


@pytest.mark.parametrize(("task", "played"), [("Countdowns", True), ("Doubled", True), ("Doubles", False)])
def test_verl_plays_what_has_turns_or_tools_by_our_loop_and_scores_the_rest(folder, treetune, task, played):
    result = treetune("train", "verl", f"kinds_of.py:{task}", "--steps", "2", "-m", "M", "--dry-run", "--json")
    assert result.code == 0, result.err
    config = result.json["config"]
    (file,) = result.json["data"]["train"]
    assert config["data.train_files"] == config["data.val_files"] == f"[{file}]"
    assert config["actor_rollout_ref.model.path"] == "M"
    assert config["reward.custom_reward_function.path"] == "pkg://treetune.trainers.verl"
    (loop,) = yaml.safe_load(Path(config[LOOPS]).read_text())
    assert loop["name"] == ("treetune" if played else "single_turn_agent")
    assert ("agent_name" in pq.read_schema(file).names) == played
    assert result.json["command"][1:3] == ["-m", "verl.trainer.main_ppo"]


def test_a_taskset_that_does_not_say_how_long_its_episodes_are_is_played_by_our_loop(folder, treetune):
    (folder / "own.py").write_text(
        "import kinds_of\n"
        "class Own(kinds_of.Countdowns):\n"
        "    def environment(self, task):\n"
        "        return super().environment(task)\n"
        "class Said(Own):\n"
        "    MULTI_TURN = True\n"
    )
    for name, default in (("Own", "treetune"), ("Said", None)):
        result = treetune("train", "verl", f"own.py:{name}", "--dry-run", "--json")
        assert result.code == 0, result.err
        assert LOOPS in result.json["config"]
        assert result.json["config"].get(DEFAULT_LOOP) == default  # where the rows do not name it
        built = treetune("build", f"own.py:{name}", "--format", "verl", "--json")
        assert (f"{DEFAULT_LOOP}=treetune" in built.json["overrides"]) == (default is not None)


def test_a_contract_of_the_taskset_does_not_hide_that_its_environment_may_have_several_turns(folder, treetune):
    (folder / "own.py").write_text(
        "from treetune import Contract, Environment, Step, Task, Taskset\n"
        "class Climb(Environment):\n"
        "    def step(self, action):\n"
        "        return Step('go on', done=action.text == 'stop')\n"
        "class Climbs(Taskset):\n"
        "    def load_tasks(self):\n"
        "        yield Task(prompt='Climb.', env_class='own.py:Climb')\n"
        "class Limited(Climbs):\n"
        "    CONTRACT = Contract(max_turns=3)\n"
        "class Discounted(Climbs):\n"
        "    CONTRACT = Contract(turn_discount=0.9)\n"
    )
    for name in ("Limited", "Discounted"):
        result = treetune("train", "verl", f"own.py:{name}", "--dry-run", "--json")
        assert result.code == 0, result.err
        assert LOOPS in result.json["config"]


def test_verl_is_told_how_our_loop_plays_and_who_else_scores(folder, treetune):
    others = folder / "loops.yaml"
    others.write_text("[{name: other, _target_: some.Loop}]")
    result = treetune(
        "train", "verl", "kinds_of.py:Countdowns", "treetune_loop.max_turns=3", f"{LOOPS}={others}",
        "reward.custom_reward_function.path=mine.py", "--dry-run", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    config = result.json["config"]
    assert config["reward.custom_reward_function.path"] == "mine.py"
    loops = yaml.safe_load(Path(config[LOOPS]).read_text())
    assert [loop["name"] for loop in loops] == ["other", "treetune"]
    assert loops[1]["max_turns"] == 3
    assert not any(key.startswith("treetune_loop") for key in config)
    result = treetune("train", "verl", "kinds_of.py:Countdowns", "treetune_loop.max_turn=3", "--dry-run")
    assert "did you mean 'max_turns'" in result.err


def test_verl_counts_an_episode_once_where_its_settings_allow_that(folder, treetune):
    def train(task, *words):
        return treetune("train", "verl", task, *words, "--dry-run", "--json")

    config = train("kinds_of.py:Countdowns", f"{MODE}=separate_async").json["config"]
    assert config[MODE] == "treetune_separate_async"
    assert config[f"+{MODULES}"].endswith("treetune.trainers.verl.trainer")
    assert MODE not in train("kinds_of.py:Doubles").json["config"]  # each episode is one answer
    for words in ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "trainer.use_v1=false"):
        assert MODE not in train("kinds_of.py:Countdowns", words).json["config"]
    refused = train("kinds_of.py:Countdowns", "algorithm.adv_estimator=rloo", "treetune_loop.rewrites=split")
    assert refused.json["code"] == "credit"


def test_credit_by_turn_is_refused_at_the_start_where_verl_has_none(folder, treetune):
    def train(*words):
        return treetune("train", "verl", "own.py:Credited", *words, "--dry-run", "--json")

    write_credited(folder)
    assert train().json["config"][MODE] == "treetune_sync"
    for words in ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "trainer.use_v1=false"):
        assert train(words).json["code"] == "credit"
    assert "credit_discount" in train("algorithm.adv_estimator=gae").json["error"]


@pytest.mark.parametrize(
    "words",
    [
        ["importance_sampling_level=sequence"],
        ["off_policy_mask_threshold=0.5"],
        ["multi_objective_aggregation=normalize_then_sum"],
        ["loss_type=luspo"],
        ["token_budget=-1", "trainer=async"],
    ],
)
def test_credit_by_turn_is_refused_before_the_start_where_trl_has_none(folder, treetune, words):
    def train(target, *words):
        return treetune("train", "trl", target, *words, "--dry-run", "--json")

    write_credited(folder)
    refused = train("own.py:Credited", *words).json
    assert refused["code"] == "credit"
    assert words[0].partition("=")[2] in refused["error"]
    assert train("kinds_of.py:Countdowns", *words).code == 0
    assert train("own.py:Credited", *words, "max_turns=1").code == 0
    usual = ["importance_sampling_level=token", "loss_type=grpo", "token_budget=4096"]
    assert train("own.py:Credited", *usual).code == 0


def write_credited(folder):
    (folder / "own.py").write_text(
        "import kinds_of\n"
        "from treetune import Contract\n"
        "class Credited(kinds_of.Countdowns):\n"
        "    CONTRACT = Contract(credit='turn', credit_discount=0.9)\n"
    )


OWN = ("max_turns=3", "turn_discount=0.9")


def test_every_trainer_takes_a_turn_limit_and_a_discount_of_the_users(folder, treetune):
    def train(trainer, *words, said="contract: max_turns=3, turn_discount=0.9, as you set it; a lower turn limit"):
        result = treetune("train", trainer, "kinds_of.py:Countdowns", *words, "--dry-run", "--json")
        assert result.code == 0, result.err
        assert said in "\n".join(f"{key}: {value}" for key, value in result.json["data"].items())
        return result.json

    (folder / "mine.yaml").write_text("{other: 1, treetune: {tries: 4, max_turns: 9}}")
    own = {"max_turns": 3, "turn_discount": 0.9}
    for trainer in ("trl", "areal"):
        assert set(OWN) <= set(train(trainer, *OWN)["command"])
    (loop,) = yaml.safe_load(Path(train("verl", *OWN)["config"][LOOPS]).read_text())
    assert loop.items() >= own.items()
    written = train("slime", *OWN, f"custom-config-path={folder / 'mine.yaml'}")["config"]["custom-config-path"]
    assert yaml.safe_load(Path(written).read_text()) == {"other": 1, "treetune": {"tries": 4, **own}}
    assert train("skyrl", OWN[0], said="contract: max_turns=3")["config"]["generator.max_turns"] == "3"


def test_verl_plays_single_answers_by_our_loop_if_their_discount_is_the_users(folder, treetune):
    result = treetune("train", "verl", "kinds_of.py:Doubles", "turn_discount=0.9", "--dry-run", "--json")
    assert result.code == 0, result.err
    assert result.json["config"][DEFAULT_LOOP] == "treetune"
    (loop,) = yaml.safe_load(Path(result.json["config"][LOOPS]).read_text())
    assert loop["turn_discount"] == 0.9


def test_areals_workflow_gets_the_users_turn_limit_and_discount():
    words = ["arithmetic", "--config", "c.yaml", "actor.path=M", *OWN]
    request, rest = read_arguments(words)
    assert request.own == {"max_turns": 3, "turn_discount": 0.9}
    assert rest == ["--config", "c.yaml", "actor.path=M"]


def test_trl_plays_the_tasks_themselves(folder, treetune):
    result = treetune(
        "train", "trl", "kinds_of.py:Countdowns", "--taskset.shuffle.seed", "1", "--steps", "2", "-m", "M", "-n", "2",
        "learning_rate=1e-3", "--dry-run", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    words = result.json["command"]
    assert words[1:5] == ["-m", "treetune.trainers.trl", "kinds_of.py:Countdowns", "--taskset.shuffle.seed=1"]
    assert {"model=M", "num_tasks=2", "max_steps=2", "learning_rate=1e-3"} <= set(words)
    assert result.json["data"]["tasks"] == "kinds_of.py:Countdowns"
    assert result.json["data"]["num_tasks"] == 2


def test_slime_draws_the_tasks_itself(folder, treetune, monkeypatch):
    monkeypatch.delitem(sys.modules, "slime", raising=False)  # what stands in for it in other tests
    result = treetune(
        "train", "slime", "kinds_of.py:Countdowns", "--steps", "3", "-m", "M", "lr=1e-6", "rollout_batch_size=4",
        "colocate=false", "use-wandb=true", "--dry-run", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    words = result.json["command"]
    assert words[1:4] == ["train.py", "--prompt-data", "kinds_of.py:Countdowns"]
    options = dict(pairwise(words))
    assert options["--custom-generate-function-path"] == "treetune.trainers.slime.generate"
    assert options["--rollout-batch-size"] == "4"
    assert options["--num-rollout"] == "3"
    assert "--colocate" not in words
    assert words[-1] == "--use-wandb"


def test_what_slime_is_told_to_load_is_there(folder, monkeypatch):
    """The names are text until slime loads them."""
    monkeypatch.chdir(folder)
    config = plan("slime", TrainRequest(target="kinds_of.py:Countdowns", build=dict)).config
    for place in (value for value in config.values() if value.startswith("treetune.")):
        module, _, name = place.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def test_areal_is_given_a_server_or_has_one_started(folder, treetune):
    result = treetune(
        "train", "areal", "arithmetic", "-n", "8", "--taskset.shuffle.seed", "1", "--steps", "5", "-m", "M",
        "gconfig.n_samples=2", "--dry-run", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    words = result.json["command"]
    assert words[1:5] == ["-m", "treetune.trainers.areal", "arithmetic", "--num-tasks=8"]
    assert words[5:7] == ["--val=64", "--taskset.shuffle.seed=1"]
    assert {"actor.path=M", "total_train_steps=5", "gconfig.n_samples=2"} <= set(words)
    assert Path(words[words.index("--config") + 1]).exists()
    result = treetune("train", "areal", "http://127.0.0.1:1", "--dry-run", "--json")
    assert result.json["data"]["task server"] == "http://127.0.0.1:1"


def test_tasks_are_served_to_areal_until_its_training_ends(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def request(target):
        return TrainRequest(target=target, build=dict)

    with serve(request("kinds_of.py:Doubles"), "train", folder / "traces") as url:
        assert len(make_rows(url, None)) == 4
        assert list(make_rows(url, 2)) == [{"task_index": 0}, {"task_index": 1}]
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{url}/api/health", timeout=5)
    with raises_code("usage", "no_such.py"), serve(request("no_such.py:Tasks"), "train", folder / "none"):
        pass
    with (
        serve(request("kinds_of.py:Endless"), "train", folder / "endless") as url,
        raises_code("usage", "-n"),
    ):
        make_rows(url, None)


def test_trl_may_play_on_a_task_server(treetune):
    result = treetune("train", "trl", "http://127.0.0.1:1", "--dry-run", "--json")
    assert result.json["data"]["tasks"] == "http://127.0.0.1:1"


def test_people_are_shown_the_same(folder, treetune):
    result = treetune("train", "skyrl", "kinds_of.py:Doubles", "--dry-run")
    assert "not installed here" in result.out
    assert "trainer.train_batch_size: 4" in result.out
    assert result.out.splitlines()[-1].startswith("$ ")


def test_the_users_keys_win_and_are_passed_on_as_they_are(folder, treetune):
    result = treetune(
        "train", "skyrl", "kinds_of.py:Doubles", "--dry-run", "--json", "trainer.train_batch_size=2", "+new.key=[a,b]",
        "trainer.logger=wandb",
    )  # fmt: skip
    words = result.json["command"]
    assert [word for word in words if "batch_size" in word] == [
        "trainer.policy_mini_batch_size=2", "trainer.train_batch_size=2",
    ]  # fmt: skip
    assert words[-2:] == ["+new.key=[a,b]", "trainer.logger=wandb"]


def test_keys_of_the_target_are_the_targets(folder, treetune):
    result = treetune("train", "skyrl", "arithmetic", "-n", "5", "--taskset.shuffle.seed", "3", "--dry-run", "--json")
    assert result.code == 0, result.err
    assert pq.read_metadata(result.json["data"]["train"][0]).num_rows == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prime-rl", "kinds_of.py:Doubles"], "treetune export verifiers"),
        (["PRIME_RL", "kinds_of.py:Doubles"], "prime-rl cannot be started by"),
        (["skyl", "kinds_of.py:Doubles"], "did you mean 'skyrl'"),
        (["skyrl", "kinds_of.py:Doubles", "--trainer.logger", "wandb"], "no dashes: trainer.logger=wandb"),
        (["skyrl", "kinds_of.py:Doubles", "wandb"], "KEY=VALUE"),
        (["skyrl", "http://127.0.0.1:1"], "server"),
        (["skyrl", "kinds_of.py:Endless"], "-n"),
        (["slime", "kinds_of.py:Endless", "-n", "3"], "config.yaml"),
        (["trl", "kinds_of.py:Endless"], "-n"),
        (["areal", "kinds_of.py:Endless"], "-n"),
        (["trl", "kinds_of.py:Dubles"], "did you mean 'Doubles'"),
        (["slime", "no_such.yaml"], "No such file"),
        (["areal", "arithmetic", "-n", "4", "--taskset.levl", "3"], "did you mean 'level'"),
        (["areal", "arithmetic", "-n", "4", "max_turns=0"], "max_turns"),
        (["trl", "arithmetic", "-n", "4", "turn_discount=2"], "turn_discount"),
        (["skyrl", "kinds_of.py:Countdowns", "turn_discount=0.9"], "CONTRACT"),
        (["skyrl", "kinds_of.py:Countdowns", "max_turns=1"], "2 or more"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(folder, treetune, arguments, said):
    result = treetune("train", *arguments, "--dry-run")
    assert result.code == 2, result.out
    assert said in result.err


def test_a_trainer_that_is_not_there_is_told_with_how_to_get_it(folder, treetune, stand_in):
    stand_in("print('started')", package="no-such-package")
    result = treetune("train", "line", "kinds_of.py:Doubles")
    assert result.code != 0
    assert "pip install line; --dry-run" in result.err
    assert "started" not in result.out


def test_the_trainers_exit_code_is_the_verbs(folder, treetune, stand_in):
    stand_in("import os, sys; print(os.environ['GREETING']); sys.exit(7)")
    result = treetune("train", "line", "kinds_of.py:Doubles")
    assert result.code == 7
    assert "hello" in result.out
    result = treetune("train", "line", "kinds_of.py:Doubles", "--json")
    assert result.code == 7
    assert result.json["code"] == 7  # what the trainer prints is not in the object
    assert "hello" in result.err


def test_whoever_ends_the_verb_ends_the_trainer(folder):
    training = subprocess.Popen([sys.executable, "-c", ENDED], cwd=folder, stdout=subprocess.PIPE, text=True)
    for line in training.stdout:
        if line.startswith("trainer"):
            trainer = int(line.split()[1])
            break
    training.terminate()
    assert training.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(trainer, 0)


ENDED = """
import sys
from treetune.cli.app import run
from treetune.core.contract import SCORED_ALONE
from treetune.trainers import launch

code = "import os, time; print('trainer', os.getpid(), flush=True); time.sleep(600)"
launch.plan_of_line = lambda request, run, tasks: launch.Launch(
    trainer="line", package="treetune", install="", data={}, config={}, command=[sys.executable, "-c", code],
    run=run, checkpoints="checkpoints/*", saved="checkpoints/{step}",
)
launch.TRAINERS["line"] = "treetune.trainers.launch:plan_of_line"
sys.exit(run(["train", "line", "kinds_of.py:Doubles"]))
"""


def test_a_trainer_finds_the_files_beside_the_user(folder, treetune, stand_in):
    stand_in("import kinds_of; print(kinds_of.Doubles.__name__)")
    assert "Doubles" in treetune("train", "line", "kinds_of.py:Doubles").out


def test_overrides_are_merged_by_their_bare_keys():
    planned = {key: Setting(value, "") for key, value in {"a": 1, "b": None, "+c": True}.items()}
    assert merge(planned, ["++c=2", "d=x=y", "~a"]) == {"++c": "2", "d": "x=y", "~a": ""}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain/path-1.parquet", "plain/path-1.parquet"),
        ("a b", "'a b'"),
        ("it's ${x}", "'it\\'s \\${x}'"),
        (["a", "b,c"], "[a,'b,c']"),
        (False, "false"),
        (1e-6, "1e-06"),
    ],
)
def test_a_value_is_written_as_hydra_reads_it(value, text):
    assert as_text(value) == text


@pytest.mark.parametrize("text", ["a${x}", r"a\${x}", r"a\\${oc.env:HOME}", "it's ${"])
def test_a_value_of_a_plan_is_text_to_omegaconf(text):
    quoted = as_text(text)
    assert quoted.startswith("'")
    inner = quoted[1:-1].replace("\\'", "'")  # as hydra unquotes it
    assert OmegaConf.create({"value": inner})["value"] == text


@pytest.mark.parametrize("trainer", ["areal", "slime"])
def test_a_trainer_that_scores_each_episode_alone_refuses_or_warns_of_groups_at_the_start(
    trainer, folder, treetune, monkeypatch
):
    (folder / "contracts_of.py").write_text(CONTRACTS)
    monkeypatch.chdir(folder)
    command = ("train", trainer, "-m", "model", "--dry-run", "--json", "--val", "0")
    refused = treetune(*command, "contracts_of.py:OnlyTogether")
    assert (refused.code, SCORED_ALONE in refused.err) == (2, True), refused.err
    warned = treetune(*command, "contracts_of.py:Together")
    assert (warned.code, SCORED_ALONE in warned.err) == (0, True), warned.err
