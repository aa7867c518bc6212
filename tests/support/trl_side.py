"""The bridge in the real TRL: run by tests/trainers/test_trl.py with the pytest of TRL's own virtual environment.

    python trl_side.py answer         # plays conversations: sides.py

The model is a random one, so what it says is nonsense: what is looked at is what becomes of its tokens.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import ExitStack
from functools import partial, partialmethod
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sides
import task_servers
import tool_shop
import torch
import vllm_stand_in
from kinds import KINDS, write_targets, written
from real_letters import letters_tokenizer
from stories import Played, letters, pieces_of, texts_of
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from datasets import Dataset, load_dataset
from treetune.cli.listing import TaskKind, cells
from treetune.errors import TreetuneError
from treetune.trainers.trl import TrlTasks, score_rows
from treetune.trainers.trl import __main__ as running
from treetune.trainers.trl.episode_trainer import EpisodeTrainer

GROUP, BATCH = 4, 8
DONE = "Done."
"""What is said when TRL asks once more after the end of an episode."""


def play_story(target: str, says: list[Any], num_tasks: int | None = None, way: str | None = None) -> Played:
    """A conversation, as `treetune train trl` starts TRL's trainers, or with the environments that TRL plays itself."""
    import trl

    texts = texts_of(says)
    folder = Path(f"trained-{len(list(Path().glob('trained-*')))}").absolute()
    tokenizer = letters_tokenizer()
    tokenizer.padding_side = "left"
    if way == "environment_factory":  # it plays tools with the templates that it knows, and asks once more at the end
        template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
        tokenizer.chat_template = template.read_text()
    tiny(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with ExitStack() as stack:
        keys = ["--steps", "1", "--output", str(folder / "run")]
        if way == "environment_factory":
            keys.append("max_completion_length=6000")  # there, that of all turns and results together
        if way == "async":
            answers = [letters(tokenizer, text) for text in texts]
            vllm = stack.enter_context(vllm_stand_in.running(folder, answers))
            keys += ["trainer=async", f"vllm_server_base_url={vllm.url}"]
        try:
            planned = sides.plan("trl", target, folder / "model", *keys, num_tasks=num_tasks)
        except sides.Refused as refused:
            return refused.played
        told = Told(tokenizer, texts, way)
        with pytest.MonkeyPatch.context() as patch:
            told.stand_in(patch)
            try:
                running.run(planned["command"][3:])
            except TreetuneError as error:
                if told.turns:
                    raise
                return Played(None, refused=str(error))
    return told.played()


class Told:
    """What stands in for a model that samples, and what TRL makes of what it says."""

    def __init__(self, tokenizer: Any, texts: list[str], way: str | None) -> None:
        self.tokenizer, self.texts, self.way = tokenizer, texts, way
        self.after = [DONE] if way == "environment_factory" and "<tool_call>" in texts[-1] else []
        self.texts = [*texts, *self.after]
        self.turns = 0
        """How many answers were sampled, of all episodes at once."""
        self.rewards: list[float | None] = []
        self.rows: list[tuple[list[int], list[int]]] = []

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        if self.way == "async":
            return self._stand_in_for_vllm(patch)
        told, reward, arguments = self, TrlTasks.reward, TrlTasks.trainer_arguments

        class Teller(EpisodeTrainer):
            def _generate_single_turn(self, prompts: Any, *_: Any, **__: Any) -> Any:
                ids = letters(told.tokenizer, told.texts[told.turns])
                told.turns += 1
                return [[*ids] for _ in prompts], [[-0.5] * len(ids) for _ in prompts]

            def _generate_and_score_completions(self, inputs: Any) -> Any:
                batch = super()._generate_and_score_completions(inputs)
                told.rows += rows_of(batch)
                return batch

        def note(tasks: Any, prompts: Any, completions: Any, **columns: Any) -> Any:
            told.rewards += (rewards := reward(tasks, prompts, completions, **columns))
            return rewards

        patch.setattr("treetune.trainers.trl.episode_trainer.EpisodeTrainer", Teller)
        patch.setattr(TrlTasks, "reward", note)
        if self.way is not None:
            patch.setattr(TrlTasks, "trainer_arguments", partialmethod(arguments, using=self.way))

    def _stand_in_for_vllm(self, patch: pytest.MonkeyPatch) -> None:
        """Also for the device, for FlashAttention, and for new weights, which a stand-in for vLLM does not take."""
        import trl_async_side
        from trl.experimental import async_grpo

        from treetune.trainers.trl.worker import RolloutWorker

        def start(worker: Any, start: Any = RolloutWorker.start) -> None:
            put = worker.rollout_buffer.put_nowait

            def note(sample: Any) -> None:
                self.turns = len(self.texts)
                self.rewards += [reward] if (reward := sample.metrics.get("reward")) is not None else []
                self.rows.append((list(sample.input_ids), list(sample.completion_mask)))
                put(sample)

            worker.rollout_buffer.put_nowait = note
            start(worker)

        trainer = partial(async_grpo.AsyncGRPOTrainer, weight_transfer=trl_async_side.NoTransfer())
        patch.setattr(async_grpo, "AsyncGRPOTrainer", trainer)
        patch.setattr(async_grpo.packing, "_flash_attn", lambda: trl_async_side.FlashAttention)
        patch.setattr(torch.cuda, "get_device_name", lambda *_: "cpu")
        patch.setattr(RolloutWorker, "start", start)

    def played(self) -> Played:
        """All of a group are played alike."""
        assert self.turns == len(self.texts), f"only {self.turns} of {len(self.texts)} turns were played"
        (reward,) = set(self.rewards)
        (trained,) = {tuple(pieces_of(self.tokenizer, ids, mask)) for ids, mask in self.rows}
        after = sum(len(letters(self.tokenizer, text)) for text in self.after)
        return Played(reward, None, list(trained[: len(trained) - after]))


class Server:
    """`treetune serve` in a process of its own, which can be killed and come back."""

    def __init__(self, target, *options):
        self.port = task_servers.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = ["-m", "treetune", "serve", target, "--http", f":{self.port}", *options]
        self._running = ExitStack()
        self.start()

    def start(self):
        self._running.enter_context(task_servers.process(*self._command, url=self.url, path="/api/health"))

    def kill(self):
        self._running.close()


@pytest.fixture
def serve():
    servers = []

    def start(*arguments):
        servers.append(Server(*arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = letters_tokenizer()
    tokenizer.padding_side = "left"
    return tokenizer


class Seen:
    """What passes between TRL and the bridge in a training."""

    def __init__(self):
        self.sampled, self.batches, self.rewards, self.prompts = [], [], [], []


def tiny(tokenizer):
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=8192, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )  # fmt: skip


def config(tmp_path, **options):
    return GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, gradient_checkpointing=False, learning_rate=1e-3,
        per_device_train_batch_size=BATCH, num_generations=GROUP, max_completion_length=6, save_strategy="no",
        report_to=[], logging_steps=1, disable_tqdm=True, **options,
    )  # fmt: skip


def train(tmp_path, tokenizer, tasks, rows, *, steps=2, rollout=True, callbacks=(), **options):
    model = tiny(tokenizer)
    seen = Seen()

    def reward(**columns):
        rewards = tasks.reward(**columns)
        seen.rewards.append(list(rewards))
        seen.prompts.append([prompt[0]["task_index"] for prompt in columns["prompts"]])
        return rewards

    trainer = GRPOTrainer(
        model,
        args=config(tmp_path, max_steps=steps, **options),
        processing_class=tokenizer, train_dataset=rows, reward_funcs=reward,
        rollout_func=tasks.rollout if rollout else None, callbacks=list(callbacks),
    )  # fmt: skip
    sample, score = trainer._generate_single_turn, trainer._generate_and_score_completions

    def sampling(prompts, *others):
        completions, logprobs = sample(prompts, *others)
        seen.sampled.append(list(zip(map(list, prompts), map(list, completions), strict=True)))
        return completions, logprobs

    def scoring(inputs):
        first = len(seen.sampled)
        batch = score(inputs)
        seen.batches.append((batch, seen.sampled[first:]))
        return batch

    trainer._generate_single_turn, trainer._generate_and_score_completions = sampling, scoring
    trainer.train()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    return seen, trainer


def rows_of(batch):
    """(tokens, those trained on) of each row of a batch as TRL has it."""
    for at in range(len(batch["prompt_ids"])):
        prompt = batch["prompt_ids"][at][batch["prompt_mask"][at].bool()].tolist()
        real = batch["completion_mask"][at].bool()
        completion = batch["completion_ids"][at][real].tolist()
        mine = batch["tool_mask"][at][real].tolist() if "tool_mask" in batch else [1] * len(completion)
        yield prompt + completion, [0] * len(prompt) + mine


def test_a_single_turn_is_trained_on_as_it_was_sampled(tmp_path, tokenizer, serve):
    server = serve("arithmetic")
    tasks = TrlTasks(server.url)
    seen, _ = train(tmp_path, tokenizer, tasks, tasks.dataset(8))
    for batch, calls in seen.batches:
        (sampled,) = calls
        assert len(sampled) == BATCH
        for (prompt, answer), row in zip(sampled, rows_of(batch), strict=True):
            assert row == (prompt + answer, [0] * len(prompt) + [1] * len(answer))
    assert all(reward is not None for rewards in seen.rewards for reward in rewards)
    tasks.close()


# Images need a processor: tests/trainers/test_images_in_trainers.py
@pytest.mark.parametrize(
    "kind", [kind for kind in TaskKind if cells()["task"][kind]["TRL"] is True and kind is not TaskKind.IMAGES]
)
def test_a_kind_of_task_that_the_matrix_gives_it_is_played(tmp_path, tokenizer, kind):
    write_targets(tmp_path)
    target, actions = KINDS[kind]

    def say(prompts, trainer):
        """What earns the whole reward, turn by turn; all episodes are at the same turn."""
        turn, say.calls = say.calls, (say.calls + 1) % len(actions)
        ids = trainer.processing_class(written(actions[turn]), add_special_tokens=False)["input_ids"]
        return [[*ids, trainer.processing_class.eos_token_id] for _ in prompts], None

    say.calls = 0
    tasks = TrlTasks(f"{tmp_path}/{target}", generate=say)
    rows = Dataset.from_list([*tasks.dataset(1)] * (BATCH // GROUP))
    seen, _ = train(tmp_path, tokenizer, tasks, rows, steps=1)
    assert seen.rewards == [[1.0] * BATCH]
    tasks.close()


def test_tools_are_called_in_rollouts_and_trained_on_as_they_were_sampled(tmp_path, tokenizer, serve):
    target = tool_shop.write(tmp_path)
    server = serve(target, "--traces", str(tmp_path / "traces"))
    asked, sampled = [], []

    def say(prompts, trainer):
        """The story, token by letter: not as the tokenizer would put it."""
        text = tool_shop.STORY[len(asked)].written()
        letters = [trainer.processing_class(letter, add_special_tokens=False)["input_ids"] for letter in text]
        ids = [*(token for letter in letters for token in letter), trainer.processing_class.eos_token_id]
        asked.append(prompts)
        sampled.append(ids)
        return [ids] * len(prompts), [[-0.5] * len(ids)] * len(prompts)

    tasks = TrlTasks(server.url, generate=say)
    rows = Dataset.from_list([*tasks.dataset(1, first=1)] * (BATCH // GROUP))
    seen, _ = train(tmp_path, tokenizer, tasks, rows, steps=1)
    assert seen.rewards == [[1.0] * BATCH]
    ((batch, _),) = seen.batches
    for ids, mask in rows_of(batch):
        assert [token for token, mine in zip(ids, mask, strict=True) if mine] == [*chain(*sampled)]
        assert ids == asked[-1][0] + sampled[-1]  # what the model was given last, and said to it
    traces = [trace for trace in tool_shop.kept(tmp_path / "traces") if trace.turns and trace.turns[0].message]
    assert len(traces) == BATCH
    expected = tool_shop.expected(target)
    for trace in traces:
        assert tool_shop.story_of(trace) == expected
    tasks.close()


def test_a_prompt_is_the_one_that_trl_itself_would_make(tmp_path, tokenizer, serve):
    server = serve("arithmetic")
    tasks = TrlTasks(server.url)
    rows = tasks.dataset(4)
    bridged, _ = train(tmp_path, tokenizer, tasks, rows, steps=1)
    alone, _ = train(tmp_path, tokenizer, tasks, rows, steps=1, rollout=False)
    prompts = [[prompt for prompt, _ in seen.sampled[0]] for seen in (bridged, alone)]
    assert prompts[0] == prompts[1]
    assert [len(rewards) for rewards in alone.rewards] == [BATCH]


def test_what_the_environment_says_is_masked_and_what_the_model_said_is_not(tmp_path, tokenizer, serve):
    server = serve("alphabet-sort")
    tasks = TrlTasks(server.url)
    seen, trainer = train(tmp_path, tokenizer, tasks, tasks.dataset())
    for batch, calls in seen.batches:
        assert len(calls) == 3
        for at, (ids, mask) in enumerate(rows_of(batch)):
            turns = [call[at] for call in calls]
            # Each prompt goes on from the tokens before, and the row is what the model saw and said last.
            for (prompt, answer), (following, _) in pairwise(turns):
                assert following[: len(prompt) + len(answer)] == prompt + answer
                assert "user" in tokenizer.decode(following[len(prompt) + len(answer) :])
            assert ids == turns[-1][0] + turns[-1][1]
            expected = [0] * len(ids)
            for prompt, answer in turns:
                expected[len(prompt) : len(prompt) + len(answer)] = [1] * len(answer)
            assert mask == expected
    assert trainer.state.log_history[0]["num_turns"] == 3


def test_a_shuffled_dataset_plays_each_group_on_one_task(tmp_path, tokenizer, serve):
    server = serve("arithmetic", "--taskset.shuffle.seed", "3")
    tasks = TrlTasks(server.url)
    rows = tasks.dataset(16).shuffle(seed=1)
    seen, _ = train(tmp_path, tokenizer, tasks, rows, steps=4)
    groups = [tuple(indices[at : at + GROUP]) for indices in seen.prompts for at in range(0, BATCH, GROUP)]
    assert all(len(set(group)) == 1 for group in groups)
    assert len(set(groups)) == 8
    asked = {row["task_index"]: row["prompt"][0]["content"] for row in rows}
    for indices, (_, calls) in zip(seen.prompts, seen.batches, strict=True):
        for index, (prompt, _) in zip(indices, calls[0], strict=True):
            assert asked[index] in tokenizer.decode(prompt)


def test_a_server_that_dies_gives_no_rewards_until_it_is_back(tmp_path, tokenizer, serve):
    server = serve("alphabet-sort")
    tasks = TrlTasks(server.url, patience=0.2)
    rows = tasks.dataset(16)
    turns = 0

    def generate(prompts, trainer):
        nonlocal turns
        turns += 1
        if turns == 5:  # in the middle of the second batch
            server.kill()
        return trainer._generate_single_turn(prompts, None, {}, 1)

    tasks._generate = generate

    class Return(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == 3:
                server.start()

    seen, trainer = train(tmp_path, tokenizer, tasks, rows, steps=4, callbacks=[Return()])
    assert [{reward is None for reward in rewards} for rewards in seen.rewards] == [{False}, {True}, {True}, {False}]
    assert tasks.failures == 2 * BATCH
    logs = trainer.state.log_history[:4]
    assert [log["task_server_failure"] for log in logs] == [0, 1, 1, 0]
    assert [log["reward"] is None or math.isnan(log["reward"]) for log in logs] == [False, True, True, False]
    for batch, _ in seen.batches[1:3]:
        assert batch["advantages"].tolist() == [0.0] * BATCH
    # What was said before the end is kept as it was; where nothing was said, nothing is trained on.
    batch, calls = seen.batches[1]
    for at, (ids, _) in enumerate(rows_of(batch)):
        assert ids == calls[-1][at][0] + calls[-1][at][1]
    assert not any(any(mask) for _, mask in rows_of(seen.batches[2][0]))


def test_without_rollouts_answers_are_scored_and_a_dead_server_gives_none(tmp_path, tokenizer, serve):
    server = serve("arithmetic")
    tasks = TrlTasks(server.url, patience=0.2)

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if state.global_step == 1:
                server.kill()

    seen, _ = train(tmp_path, tokenizer, tasks, tasks.dataset(8), rollout=False, callbacks=[Kill()])
    assert [{reward is None for reward in rewards} for rewards in seen.rewards] == [{False}, {True}]
    assert "tool_mask" not in seen.batches[0][0]


def test_the_curve_of_train_tiny_goes_on_though_answers_are_lost(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "train_tiny"))
    import train as example

    tokenizer = example.make_tokenizer()
    model, rows = example.make_model(tokenizer), {"prompt": [[{"role": "user", "content": "abc"}]] * 3}
    for rewards, share in (([1.0, None, 0.0], 0.5), ([None] * 3, None)):
        lost = SimpleNamespace(reward=lambda prompts, answers, rewards=rewards: rewards)
        assert example.exact_match(model, tokenizer, lost, rows) == share


def test_it_is_evaluated_on_other_tasks(tmp_path, tokenizer, serve):
    server = serve("arithmetic")
    tasks = TrlTasks(server.url)
    seen, trainer = train(tmp_path, tokenizer, tasks, tasks.dataset(8), steps=1, per_device_eval_batch_size=BATCH)
    trainer.evaluate(tasks.dataset(2, first=100))
    assert set(seen.prompts[-1]) == {100, 101}


def test_rows_of_every_kind_have_the_rewards_of_eval(tmp_path, tokenizer):
    """The trainer hands the rows over; answers that were known before take the place of sampled ones."""
    asked = json.loads(Path(os.environ["RUNS"]).read_text())
    for run, expected in zip(asked["runs"], asked["rewards"], strict=True):
        rows = load_dataset("parquet", data_files=run["files"], split="train")
        number_of = {row["extra_info"]["uid"]: number for number, row in enumerate(rows)}
        seen = []

        def reward(prompts, completions, *, run=run, number_of=number_of, seen=seen, **columns):
            numbers = [number_of[info["uid"]] for info in columns["extra_info"]]
            known = [[{"role": "assistant", "content": run["answers"][number]}] for number in numbers]
            seen.extend(zip(numbers, score_rows(prompts, known, **columns), strict=True))
            return score_rows(prompts, completions, **columns)

        trainer = GRPOTrainer(
            tiny(tokenizer), args=config(tmp_path, max_steps=1), processing_class=tokenizer, train_dataset=rows,
            reward_funcs=reward,
        )  # fmt: skip
        trainer.train()
        assert len(seen) >= BATCH
        assert seen == [(number, expected[number]) for number, _ in seen]


if __name__ == "__main__":
    sides.answer(play_story)
