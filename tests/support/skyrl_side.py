"""Runs in SkyRL's virtual environment, and says what the real SkyRL and skyrl-gym make of tasks.

    python skyrl_side.py WHAT REQUEST.json ANSWER.json     # needs a skyrl_gym that was not touched before
    python skyrl_side.py answer                            # answers any number of requests: sides.py

What each WHAT is asked and answers stands with its function.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sides
from stories import Played, letters, pieces_of, texts_of


def items(request: dict[str, Any]) -> list[list[Any]]:
    """The items of SkyRL's own PromptDataset over `files`: messages, env_class, extras, uid."""
    return [list(item) for item in prompts(request)]


def prompts(request: dict[str, Any]) -> Any:
    from skyrl.train.dataset import PromptDataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    dataset = PromptDataset(request["files"], tokenizer, request.get("max_prompt_length", 100_000), num_workers=1)
    return [dataset[position] for position in range(len(dataset))]


def episodes(request: dict[str, Any]) -> list[list[Any]]:
    """Each item of each run's `files` played in the environment that it names, with the `answers` of its position.
    `all`: our environments take the place of skyrl-gym's, as they do where Treetune starts SkyRL."""
    from treetune.trainers.skyrl import register

    if request.get("all"):
        register(replace=True)
    for spec, id in request["register"]:
        register(spec, id=id, replace=True)
    return [
        [
            episode(env_class, messages, extras, answers, request["config"])
            for (messages, env_class, extras, _), answers in zip(prompts(request | run), run["answers"], strict=True)
        ]
        for run in request["runs"]
    ]


def episode(env_class: str, messages: Any, extras: Any, answers: list[str], config: dict[str, Any]) -> list[Any]:
    """Which class it was, the reward and the end of each step, and the uid of the task that one of ours was given."""
    import skyrl_gym

    env = skyrl_gym.make(env_class, env_config=SimpleNamespace(**config), extras=extras)
    env.init(messages)
    outputs: list[Any] = []
    for answer in answers:
        if not outputs or not outputs[-1]["done"]:
            outputs.append(env.step(answer))
    env.close()
    steps = [[float(output["reward"]), bool(output["done"])] for output in outputs]
    return [type(env).__module__, steps, getattr(getattr(env, "task", None), "uid", None)]


def generated(request: dict[str, Any]) -> dict[str, Any]:
    """What SkyRL's own generator, the one that trains, makes of `files`, where an engine gives scripted `answers` by
    prompt and turn."""
    allow_typed_dicts()
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
    from transformers import AutoTokenizer

    from treetune.trainers.skyrl import register

    register(replace=True)
    for spec, id in request.get("register", []):
        register(spec, id=id, replace=True)
    config = SkyRLTrainConfig.from_cli_overrides(request.get("overrides", []))
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    generator = SkyRLGymGenerator(
        config.generator, config.environment.skyrl_gym, Engine(tokenizer, request["answers"]), tokenizer
    )
    rows = prompts(request)
    output = asyncio.run(
        generator.generate(
            {
                "prompts": [messages for messages, _, _, _ in rows],
                "env_classes": [env_class for _, env_class, _, _ in rows],
                "env_extras": [extras for _, _, extras, _ in rows],
                "sampling_params": None,
                "trajectory_ids": None,
            }
        )
    )
    return {
        "rewards": output["rewards"],
        "texts": [tokenizer.decode(ids) for ids in output["response_ids"]],
        "trained": [
            tokenizer.decode([token for token, mine in zip(ids, mask, strict=True) if mine])
            for ids, mask in zip(output["response_ids"], output["loss_masks"], strict=True)
        ],
        "metrics": output["rollout_metrics"],
        "response_ids": output["response_ids"],
        "loss_masks": output["loss_masks"],
    }


def play_story(target: str, says: list[Any], num_tasks: int | None = None) -> Played:
    """A conversation, as `treetune train skyrl` starts SkyRL: the rewards and tokens that its generator gives."""
    allow_typed_dicts()
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
    from tiny_model import make_model
    from transformers import AutoTokenizer

    from treetune.trainers.skyrl import register

    model, texts = Path("model"), texts_of(says)
    if not model.exists():
        make_model(model)
    try:
        planned = sides.plan("skyrl", target, model, num_tasks=num_tasks)
    except sides.Refused as refused:
        return refused.played
    words = iter(planned["command"])
    register(replace=True)
    for id in (next(words) for word in words if word == "--env"):
        register(id, id=id, replace=True)
    config = SkyRLTrainConfig.from_cli_overrides([f"{key}={value}" for key, value in planned["config"].items()])
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = Teller(tokenizer, texts)
    generator = SkyRLGymGenerator(config.generator, config.environment.skyrl_gym, engine, tokenizer)
    files, longest = planned["data"]["train"], config.trainer.max_prompt_length
    ((messages, env_class, extras, _),) = prompts({"model": model, "files": files, "max_prompt_length": longest})
    asked = {"prompts": [messages], "env_classes": [env_class], "env_extras": [extras]}
    output = asyncio.run(generator.generate({**asked, "sampling_params": None, "trajectory_ids": None}))
    assert engine.told == len(texts), f"only {engine.told} of {len(texts)} turns were played"
    (rewards,), (ids,), (mask,) = (output[key] for key in ("rewards", "response_ids", "loss_masks"))
    rewards = rewards if isinstance(rewards, list) else [rewards]
    return Played(sum(rewards), None, pieces_of(tokenizer, ids, mask))


class Teller:
    """An engine that says what it is told to, turn by turn, in tokens of its own choice."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self._tokenizer, self._texts, self.told = tokenizer, texts, 0

    async def generate(self, request: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        text = self._texts[self.told]
        self.told += 1
        return {"responses": [text], "response_ids": [letters(self._tokenizer, text)], "stop_reasons": ["stop"]}

    async def finish_session(self, session: str) -> None:
        pass


class Engine:
    """Answers each conversation with the next of the answers to its first user message."""

    def __init__(self, tokenizer: Any, answers: dict[str, list[str]]) -> None:
        self._tokenizer, self._answers = tokenizer, answers

    async def generate(self, request: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        [ids] = request["prompt_token_ids"]
        text = self._tokenizer.decode(ids)
        turn = text.count("<|im_start|>assistant") - 1
        [answers] = [answers for asked, answers in self._answers.items() if asked in text]
        given = [*self._tokenizer(answers[turn]).input_ids, self._tokenizer.eos_token_id]
        return {"responses": [answers[turn]], "response_ids": [given], "stop_reasons": ["stop"]}

    async def finish_session(self, session: str) -> None:
        pass


def on_ray(request: dict[str, Any]) -> list[Any]:
    """What a Ray worker knows and plays, where its code calls `register` or leaves it to the hook."""
    import ray

    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="error")

    @ray.remote
    def entry_point() -> Any:
        import skyrl_gym

        if not request["hook"]:
            assert "alphabet-sort" not in skyrl_gym.registry
            from treetune.trainers.skyrl import register

            register()
            register(request["file"], id="multiply")
        row = request["row"]
        extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
        played = episode(row["env_class"], row["prompt"], extras, request["answers"], {})
        return [sorted(skyrl_gym.registry), skyrl_gym.registry["gsm8k"].entry_point, played]

    try:
        return ray.get(entry_point.remote())
    finally:
        ray.shutdown()


def carried(request: dict[str, Any]) -> Any:
    """What a Ray worker plays by the entries that it was sent, of an environment that only the driver knows."""
    import ray

    from treetune import Environment, Step, register
    from treetune.trainers.skyrl.tasks import _entries_for

    class Shout(Environment):
        async def step(self, action: Any) -> Step:
            return Step(reward=float(action.text.isupper()), done=True)

    register(id="shout", entry_point=Shout)
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="error")

    @ray.remote
    def entry_point(specs: dict[str, Any]) -> Any:
        import skyrl_gym

        assert not specs.keys() & skyrl_gym.registry.keys()
        skyrl_gym.registry.update(specs)
        return [episode(id, [], {}, request["answers"], {}) for id in specs]

    try:
        return ray.get(entry_point.remote(_entries_for({"shout": "shout"}, replace=False)))
    finally:
        ray.shutdown()


def config(request: dict[str, Any]) -> dict[str, Any]:
    """What SkyRL's own command line reads out of `overrides`."""
    allow_typed_dicts()
    from skyrl.train.config import SkyRLTrainConfig

    data = SkyRLTrainConfig.from_cli_overrides(request["overrides"]).data
    return {"train_data": data.train_data, "val_data": data.val_data}


def tokenizer_of(request: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(request["model"])


def ours(files: list[str], tokenizer: Any, limit: int) -> Any:
    from treetune.trainers.skyrl import PromptDataset

    return PromptDataset(files, tokenizer, limit, quiet=True)


def theirs(files: list[str], tokenizer: Any, limit: int) -> Any:
    from skyrl.train.dataset import PromptDataset

    return PromptDataset(files, tokenizer, limit, num_workers=1)


def kept(request: dict[str, Any]) -> dict[str, Any]:
    """By limit: how many rows of `files` our PromptDataset and SkyRL's own keep, and how many of their items differ."""
    from treetune.data.arrow_values import drop_nulls

    tokenizer, files, answer = tokenizer_of(request), request["files"], {}
    for limit in (150, 200, 300, 1_000):
        mine, other = ours(files, tokenizer, limit), theirs(files, tokenizer, limit)
        batch = other.collate_fn([other[position] for position in range(len(other))])
        differ = sum(
            {**item, "uid": ""} != {**drop_nulls(found), "uid": ""}
            for item, found in zip(mine.collate_fn(list(mine)), batch, strict=False)
        )
        answer[str(limit)] = [len(mine), len(other), differ]
    return answer


def loader(request: dict[str, Any]) -> dict[str, Any]:
    """Batches of our PromptDataset from the trainer's own loader, through an epoch and after a restart in the middle of
    it."""
    allow_typed_dicts()
    from skyrl.train.utils.trainer_utils import build_dataloader

    config = SimpleNamespace(
        trainer=SimpleNamespace(train_batch_size=16, eval_batch_size=16, seed=3, epochs=1),
        data=SimpleNamespace(dataloader=SimpleNamespace(num_workers=2, persistent_workers=False)),
    )
    tokenizer, files = tokenizer_of(request), request["files"]
    mine, other = ours(files, tokenizer, 1_000), theirs(files, tokenizer, 1_000)
    whole = list(build_dataloader(config, mine))
    interrupted = build_dataloader(config, mine)
    before = list(islice(interrupted, 5))
    state = interrupted.state_dict()
    resumed = build_dataloader(config, ours(files, tokenizer, 1_000))
    resumed.load_state_dict(state)
    after = list(resumed)
    reference = list(build_dataloader(config, other))
    tensors = mine.collator(whole[0])
    return {
        "batches": len(whole),
        "keys": sorted(whole[0][0]),
        "uids": len({item["uid"] for batch in whole for item in batch}),
        "resumed": [*before, *after] == whole,
        "as_theirs": [[i["prompt"] for i in b] for b in whole] == [[i["prompt"] for i in b] for b in reference],
        "shape": list(tensors["input_ids"].shape),
        "types": [str(tensors["input_ids"].dtype), str(tensors["attention_mask"].dtype)],
        "decoded": [
            tokenizer.decode(ids[mask.bool()])
            == tokenizer.apply_chat_template(item["prompt"], add_generation_prompt=True, tokenize=False)
            for ids, mask, item in zip(tensors["input_ids"], tensors["attention_mask"], whole[0], strict=True)
        ],
        "padded_left": bool((tensors["attention_mask"].diff(dim=1) >= 0).all()),
    }


def faults(request: dict[str, Any]) -> dict[str, str]:
    """What each says of `files` with a fault."""
    told = {}
    for name, make in (("ours", ours), ("theirs", theirs)):
        try:
            make(request["files"], tokenizer_of(request), 1_000)
            told[name] = ""
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def checkpoints(request: dict[str, Any]) -> list[list[int]]:
    """Which steps have a checkpoint after each step, if 3 are kept, and validations follow that earn `rewards`."""
    allow_typed_dicts()
    from skyrl.train.utils import trainer_utils

    from treetune.trainers.skyrl.tasks import clean_up

    trainer_utils.run_on_each_node = lambda nodes, work, *given: [work(*given) for _ in nodes]  # without a cluster
    saved, validation = (Path(request["folder"]) / name for name in ("checkpoints", "validation"))
    validation.mkdir()
    keys = SimpleNamespace(ckpt_path=str(saved), max_ckpts_to_keep=3)
    dispatch = SimpleNamespace(get_node_ids=lambda: ["one", "two"])
    trainer, kept = SimpleNamespace(cfg=SimpleNamespace(trainer=keys), dispatch=dispatch), []
    for step, reward in enumerate(request["rewards"], 1):
        (saved / f"global_step_{step}" / "policy").mkdir(parents=True)
        clean_up(trainer, validation)
        kept.append(sorted(int(place.name.rpartition("_")[2]) for place in saved.iterdir()))
        line = {"input": "1", "output": "2", "gts": None, "score": reward, "step": step}  # as verl writes it
        (validation / f"{step}.jsonl").write_text(json.dumps(line) + "\n")
    return kept


def allow_typed_dicts() -> None:
    """SkyRL 0.3 gives pydantic a `typing.TypedDict`, which pydantic refuses before Python 3.12."""
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict


def main(what: str, *files: str) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if what == "answer":
        sides.answer(play_story, items, episodes, generated, config, kept, loader, faults, checkpoints)
    else:
        asked, answer = map(Path, files)
        answer.write_text(json.dumps(globals()[what](json.loads(asked.read_text()))))


if __name__ == "__main__":
    main(*sys.argv[1:])
