"""Runs where a trainer is installed, in the folder of the stories, and says what that trainer makes of them.

    python every_trainer_side.py trl         # prints {way: {story: {"reward", "turns", "trained"}}} as its last line

What a model says is written in `stories.py`, in tokens of its own choice. The trainers' own classes do the rest.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import stories
import task_servers
from stories import STORIES, Played, Story, pieces_of

HERE = Path.cwd()


def trl() -> dict[str, dict[str, Played]]:
    import torch
    import trl_async_side
    from trl.experimental.async_grpo import packing

    # What wants a GPU: see trl_async_side.py.
    torch.cuda.get_device_name = lambda *_: "cpu"
    packing._flash_attn = lambda: trl_async_side.FlashAttention
    return {
        "TRL": {name: _trl_rollouts(story) for name, story in STORIES.items()},
        "TRL, its own tool loop": {"tools": _trl_environments(STORIES["tools"])},
        "TRL async": {name: _trl_async(story) for name, story in STORIES.items()},
    }


def _trl_rollouts(story: Story) -> Played:
    import trl_side
    from real_letters import letters_tokenizer

    from datasets import Dataset
    from treetune.trainers.trl import TrlTasks

    tokenizer = letters_tokenizer()
    tokenizer.padding_side = "left"
    texts = iter(story.texts)

    def say(prompts: Any, trainer: Any) -> Any:
        ids = stories.letters(tokenizer, next(texts))
        return [ids] * len(prompts), [[-0.5] * len(ids)] * len(prompts)

    with TrlTasks(story.target, generate=say) as tasks:
        rows = Dataset.from_list([*tasks.dataset(1, first=story.index)] * (trl_side.BATCH // trl_side.GROUP))
        seen, _ = trl_side.train(HERE / "rollouts", tokenizer, tasks, rows, steps=1)
    ((batch, _),) = seen.batches
    return _of_all(tokenizer, seen.rewards[0], trl_side.rows_of(batch))


def _trl_environments(story: Story) -> Played:
    import trl
    import trl_environments_side
    from real_letters import letters_tokenizer

    from treetune.trainers.trl import TrlTasks

    tokenizer = letters_tokenizer()
    tokenizer.padding_side = "left"
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"  # it plays tools with those it knows
    tokenizer.chat_template = template.read_text()
    done = trl_environments_side.DONE  # it asks once more after the end
    with TrlTasks(story.target) as tasks:
        given = tasks.trainer_arguments(1, first=story.index, using="environment_factory")
        batch, _, rewards, *_ = trl_environments_side.train(
            HERE / "environments", tokenizer, tasks, given, [*story.texts, done]
        )
    played = _of_all(tokenizer, rewards[0], trl_environments_side.rows_of(batch))
    extra = [*done, stories.END]
    assert played.trained is not None
    assert played.trained[-len(extra) :] == extra
    return played._replace(trained=played.trained[: -len(extra)])


def _trl_async(story: Story) -> Played:
    import trl_async_side
    import vllm_stand_in
    from real_letters import letters_tokenizer

    from treetune.trainers.trl import TrlTasks

    tokenizer, folder = letters_tokenizer(), HERE / f"async-{story.index}"
    folder.mkdir()
    answers = [stories.letters(tokenizer, text) for text in story.texts]
    with vllm_stand_in.running(folder, answers) as vllm, TrlTasks(story.target, call_format="hermes") as tasks:
        seen, *_ = trl_async_side.train(folder, tasks, vllm.url, 1, first=story.index, steps=1)
    rows = [(sample.input_ids.tolist(), sample.completion_mask.tolist()) for sample in seen]
    return _of_all(tokenizer, [sample.metrics["reward"] for sample in seen], rows)


def _of_all(tokenizer: Any, rewards: Any, rows: Any) -> Played:
    """Of a batch whose rows must all be the same."""
    (reward,) = set(rewards)
    (trained,) = {tuple(pieces_of(tokenizer, ids, mask)) for ids, mask in rows}
    return Played(reward, None, list(trained))


def areal() -> dict[str, dict[str, Played]]:
    from areal_side import Speaker, check, play, workflow
    from real_letters import letters_tokenizer

    tokenizer, found = letters_tokenizer(), {}
    for name, story in STORIES.items():
        port = task_servers.free_port()
        url = f"http://127.0.0.1:{port}"
        command = ["-m", "treetune", "serve", story.target, "--http", f":{port}"]
        with task_servers.process(*command, url=url, path="/api/health"):
            engine = Speaker(tokenizer, lambda prompt, turn, story=story: story.texts[turn])
            flow = workflow(tokenizer, url, turn_discount=1.0)
            trajectory = play(flow, engine, {"task_index": story.index})
        check(trajectory, engine)
        ids, mask = trajectory["input_ids"][0].tolist(), trajectory["loss_mask"][0].tolist()
        found[name] = Played(trajectory["rewards"].item(), None, pieces_of(tokenizer, ids, mask))
    return {"AReaL": found}


def skyrl() -> dict[str, dict[str, Played]]:
    import skyrl_side
    from tiny_model import make_model
    from transformers import AutoTokenizer

    from treetune.data.rows.formats import FORMATS
    from treetune.tasksets.target import load_taskset

    make_model(HERE / "model")
    tokenizer = AutoTokenizer.from_pretrained(HERE / "model")

    class Letters(skyrl_side.Engine):
        async def generate(self, request: Any, model: Any = None) -> Any:
            answer = await super().generate(request, model)
            return {**answer, "response_ids": [stories.letters(tokenizer, text) for text in answer["responses"]]}

    skyrl_side.Engine = Letters  # type: ignore[misc]
    found = {}
    for name, story in STORIES.items():
        task = load_taskset(story.target)[story.index]
        file = HERE / f"{story.environment.partition('.')[0]}.jsonl"
        file.write_text(json.dumps(FORMATS["skyrl"].row_of(task)) + "\n")
        output = skyrl_side.generated(
            {
                "model": str(HERE / "model"),
                "files": [str(file)],
                "register": [[f"{HERE}/{story.environment}", story.environment]],
                "answers": {task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]: story.texts},
                "overrides": ["generator.max_turns=4", "generator.batched=false", "generator.max_input_length=8192"],
            }
        )
        (rewards,), (ids,), (mask,) = (output[key] for key in ("rewards", "response_ids", "loss_masks"))
        found[name] = Played(sum(rewards), None, pieces_of(tokenizer, ids, mask))
    return {"SkyRL": found}


def verl() -> dict[str, dict[str, Played]]:
    """Its agent loop worker, in this process."""
    import command_line
    import ray
    import verl_loop_side
    from tiny_model import make_model

    make_model(HERE / "model")
    (HERE / "loops.yaml").write_text("- {name: treetune, _target_: treetune.trainers.verl.loop.TreetuneLoop}\n")
    (HERE / "engine").mkdir()
    request = {"model": str(HERE / "model"), "loops": str(HERE / "loops.yaml")}
    side, found = verl_loop_side.Side(request, HERE / "engine"), {}
    # What stands above may have started one already.
    ray.init("local", num_cpus=2, include_dashboard=False, ignore_reinit_error=True)
    try:
        for number, (name, story) in enumerate(STORIES.items()):
            built = command_line.run(HERE, ["build", story.target, "--format", "verl", "--json"], {})
            assert built.code == 0, built.err
            run = {
                "name": name,
                "worker": "here",
                "files": built.json["train_files"],
                "rows": [story.index],
                "says": {"": [story.texts]},
            }
            (sample,) = side.run(number, run)["samples"]
            trained = pieces_of(side.tokenizer, sample["responses"], sample["response_mask"])
            found[name] = Played(sum(sample["rm_scores"]), sample["fields"]["turn_scores"], trained)
    finally:
        ray.shutdown()
    return {"verl": found}


def verifiers() -> dict[str, dict[str, Played]]:
    import verifiers.v1 as vf
    from model_endpoint import calls, endpoint, said
    from verifiers.v1.serve import EnvClient, EnvServer

    from treetune.trainers.verifiers import export_package

    async def play(story: Story) -> Played:
        package = export_package(story.target, HERE / f"env-{story.index}").folder
        sys.path.insert(0, str(package))

        def answer(number: int, _: Any) -> Any:
            turn = story.says[number]
            whole = calls(*turn.calls, content=turn.text or None) if turn.calls else said(turn.text)
            whole["choices"][0]["index"] = 0
            return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", **whole}

        config = vf.resolve_env_config({"taskset": {"id": package.name, "model_retries": 0}, "agent": {}})
        server = EnvServer(config, address="tcp://127.0.0.1:0")
        running, client = asyncio.create_task(server.run()), EnvClient(server.address)
        try:
            async with endpoint(answer) as (policy, _):
                await client.wait_for_server_startup(timeout=60, interval=0.1)
                tasks = [task.data.model_dump() for task in vf.load_taskset(config.taskset)]
                model = vf.EvalClientConfig(base_url=policy._endpoint.base_url, api_key_var="NO_KEY")
                episode = await client.run(
                    task_data=tasks[story.index], client=model, model="m", sampling=vf.SamplingConfig()
                )
        finally:
            await client.close()
            running.cancel()
            await asyncio.wait([running])
        (trace,) = episode.traces
        assert episode.ok, trace.errors
        assert trace.num_turns == len(story.says)
        return Played(trace.rewards["episode_reward"].value)

    return {"verifiers": {name: asyncio.run(play(story)) for name, story in STORIES.items()}}


if __name__ == "__main__":
    played = globals()[sys.argv[1]]()
    print(
        "\n" + json.dumps({way: {name: one._asdict() for name, one in found.items()} for way, found in played.items()})
    )
