"""Runs as other programs write them: each command is run in that program's virtual environment, by its own classes.

    python foreign_side.py verl|trl|skyrl|inspect FOLDER

The files in tests/runs/recorded were written by these commands; `tests/runs/test_foreign_real.py` runs them again.
Every program records the same sums: two prompts, two answers of each, in two steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SUMS = [("What is 2 + 3?", "5", ["I think: 5", "6"]), ("What is 4 + 4?", "8", ["8", "It is 8"])]
REWARDS = [[1.0, 0.0], [1.0, 1.0]]


def rows():
    """A prompt, its truth, an answer and its reward, for each rollout of a step."""
    for (prompt, truth, answers), rewards in zip(SUMS, REWARDS, strict=True):
        for answer, reward in zip(answers, rewards, strict=True):
            yield prompt, truth, answer, reward


def write_verl(folder: Path) -> None:
    import numpy as np
    import torch
    from real_letters import letters_tokenizer
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    tokenizer = letters_tokenizer()

    def tokens(texts, side):
        tokenizer.padding_side = side
        return tokenizer(texts, return_tensors="pt", padding=True)["input_ids"]

    trainer = object.__new__(RayPPOTrainer)
    trainer.tokenizer = tokenizer
    trainer._init_dump_executor()
    prompts, truths, answers, rewards = map(list, zip(*rows(), strict=True))
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rendered = [tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in asked]
    decoded = tokenizer.batch_decode(tokens(rendered, "left"), skip_special_tokens=True)
    for step in (1, 2):
        trainer.global_steps = step
        responses = tokens([f"{answer}<|im_end|>" for answer in answers], "right")
        scores = torch.zeros(responses.shape)
        scores[:, -1] = torch.tensor(rewards)
        batch = DataProto.from_dict(
            tensors={"prompts": tokens(rendered, "left"), "responses": responses, "token_level_scores": scores},
            non_tensors={
                "reward_model": np.array([{"ground_truth": truth} for truth in truths], dtype=object),
                "request_id": np.array([f"r{number}" for number in range(len(answers))], dtype=object),
            },
        )
        told = {"acc": np.array(rewards), "pred": np.array([answer[-1] for answer in answers], dtype=object)}
        trainer._log_rollout_data(batch, told, {}, str(folder / "rollouts"))
    for step in (0, 10):
        trainer.global_steps = step
        right = rewards if step else [0.0] * len(rewards)
        told = {"reward": right, "acc": right}
        trainer._dump_generations(decoded, answers, truths, right, told, str(folder / "validation"))
    trainer._shutdown_dump_executor()
    _write_verl_v1(folder, decoded)


def _write_verl_v1(folder: Path, asked: list[str]) -> None:
    """The trainer of v1 names each line `{prompt}_{rollout}_{part}`; here the first rollout has two parts."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    class Trainer(PPOTrainer):
        pass

    Trainer.__abstractmethods__ = frozenset()
    trainer = object.__new__(Trainer)
    trainer._init_dump_executor()
    for step in (1, 2):
        trainer.global_steps = step
        inputs = [asked[0], asked[0] + "It is 5. Sure?", asked[0], asked[2], asked[2]]
        outputs = ["I add.", "5", "6", "8", "It is 8"]
        scores = [0.0, 1.0, 0.0, 1.0, 1.0]
        uids = [f"a-b{step}_0_0", f"a-b{step}_0_1", f"a-b{step}_1_0", f"c_d{step}_0_0", f"c_d{step}_1_0"]
        truths = ["5", "5", "5", "8", "8"]
        trainer._dump_generations(inputs, outputs, truths, scores, {"uid": uids}, str(folder / "rollouts-v1"))
    trainer._shutdown_dump_executor()


def write_trl(folder: Path) -> None:
    from real_letters import letters_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed
    from trl import GRPOConfig, GRPOTrainer

    from datasets import Dataset

    tokenizer = letters_tokenizer()
    tokenizer.padding_side = "left"
    set_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **sizes))

    def vowels(completions, log_extra, **columns):
        """A reward, and what it logs beside: a text and a number."""
        said = [completion[0]["content"] for completion in completions]
        log_extra("letters", [sum(letter.isalpha() for letter in text) / 7 for text in said])
        log_extra("begins", [text[:2] for text in said])
        return [sum(letter in "aeiou" for letter in text) / len(text or "-") for text in said]

    def short(completions, truth, **columns):
        said = zip((each[0]["content"] for each in completions), truth, strict=True)
        return [None if right == "8" else float(len(text) < 8) for text, right in said]

    def train(name, **settings):
        sums = [(f"What is {a} + {b}?", str(a + b)) for a, b in ((2, 3), (4, 4), (1, 1), (9, 0))]
        data = [{"prompt": [{"role": "user", "content": prompt}], "truth": truth} for prompt, truth in sums]
        config = GRPOConfig(
            output_dir=str(folder / name), per_device_train_batch_size=8, num_generations=4, max_completion_length=8,
            max_steps=2, logging_steps=1, log_completions=True, report_to=[], save_strategy="no", use_cpu=True,
            disable_tqdm=True, gradient_checkpointing=False, bf16=False, **settings,
        )  # fmt: skip
        GRPOTrainer(model, [vowels, short], config, Dataset.from_list(data), processing_class=tokenizer).train()

    train("plain")
    train("again", steps_per_generation=2)
    train("weighted", reward_weights=[1.0, 0.25])


def write_skyrl(folder: Path) -> None:
    from real_letters import letters_tokenizer
    from skyrl.train.utils.trainer_utils import dump_per_dataset_eval_results

    tokenizer = letters_tokenizer()
    asked = [[{"role": "user", "content": prompt}] for prompt, *_ in rows()]
    prompts = [tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in asked]
    prompts = [tokenizer(each)["input_ids"] for each in prompts]
    answers = [tokenizer(f"{answer}<|im_end|>")["input_ids"] for _, _, answer, _ in rows()]
    print(json.dumps([prompts[0], answers[0]]))
    for step in (5, None):
        place = folder / "dumped_evals" / ("eval_only" if step is None else f"global_step_{step}_evals")
        place.mkdir(parents=True)
        output = {
            "prompt_token_ids": prompts,
            "response_ids": answers,
            "rewards": [reward for *_, reward in rows()],
            "stop_reasons": ["stop", "length", "stop", "stop"],
        }
        extras = [{"data_source": "sums", "reward_spec": {"ground_truth": truth}} for _, truth, *_ in rows()]
        sources = [extra["data_source"] for extra in extras]
        dump_per_dataset_eval_results(place, tokenizer, output, sources, ["sums"] * 4, extras, {"eval/all": 0.75})


PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJg"
    "gg=="
)


def write_inspect(folder: Path) -> None:
    """A log with calls of tools, one of which fails, a model that fails and an image; and one with a limit, as JSON."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.log import read_eval_log, write_eval_log
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessageAssistant,
        ChatMessageUser,
        ContentImage,
        ContentReasoning,
        ContentText,
        ModelOutput,
        ModelUsage,
        get_model,
    )
    from inspect_ai.scorer import includes, match
    from inspect_ai.solver import generate, solver, use_tools
    from inspect_ai.tool import ToolError, tool

    name = "mockllm/model"

    @tool
    def add():
        async def execute(x: int, y: int):
            """Add two numbers.

            Args:
                x: the first
                y: the second
            """
            if x == 13:
                raise ToolError("13 is not added")
            return str(x + y)

        return execute

    def say(messages):
        asked, last = messages[0].text, messages[-1]
        if "fail" in asked:
            raise RuntimeError("the model is out of order")
        if last.role == "tool":
            return ModelOutput.from_content(name, f"The answer is {last.error.message if last.error else last.text}")
        if "+" in asked:
            x, y = (13, 1) if "13" in asked else (2, 3)
            return ModelOutput.for_tool_call(name, "add", {"x": x, "y": y}, content="Let me add.")
        if "picture" in asked:
            parts = [ContentReasoning(reasoning="It is small."), ContentText(text="A dot.")]
            return ModelOutput(model=name, choices=[ChatCompletionChoice(message=ChatMessageAssistant(content=parts))])
        return ModelOutput.from_content(name, "more")

    def answer(messages, tools, tool_choice, config):
        output, read = say(messages), 10 * len(messages)
        # Said here, for Inspect would count tokens by a file that it fetches.
        output.usage = ModelUsage(input_tokens=read, output_tokens=7, total_tokens=read + 7)
        return output

    @solver
    def talk():
        async def solve(state, generate):
            while True:
                state.messages.append(ChatMessageUser(content="go on"))
                state = await generate(state)

        return solve

    picture = [ChatMessageUser(content=[ContentText(text="What is in the picture?"), ContentImage(image=PNG)])]
    samples = [
        Sample(id="two", input="What is 2 + 3?", target="5", metadata={"level": 1}),
        Sample(id="thirteen", input="What is 13 + 1?", target="14"),
        Sample(id="fail", input="Please fail.", target="x"),
        Sample(id="a/b c", input=picture, target=["A dot", "a point"]),
    ]
    sums = Task(name="sums", dataset=samples, solver=[use_tools(add()), generate()], scorer=[includes(), match()])
    talks = [Sample(input="Talk to me.", target="bye")]
    chatter = Task(name="chatter", dataset=talks, solver=talk(), scorer=includes(), message_limit=6)
    for task, form in ((sums, "eval"), (chatter, "json")):
        (log,) = eval(
            task, model=get_model(name, custom_outputs=answer), epochs=2, log_dir=str(folder / "logs"), log_format=form,
            fail_on_error=False, display="none",
        )  # fmt: skip
        log = read_eval_log(log.location)
        for sample in log.samples:  # what names files of the machine that wrote it
            sample.events = [event for event in sample.events if event.event not in ("error", "logger")]
            for error in [sample.error] if sample.error else []:
                error.traceback = error.traceback_ansi = "Traceback: ..."
            for event in sample.events:
                if getattr(event, "traceback", None):
                    event.traceback = event.traceback_ansi = "Traceback: ..."
        write_eval_log(log, str(folder / f"{task.name}.{form}"))


if __name__ == "__main__":
    command, place = sys.argv[1], Path(sys.argv[2])
    {"verl": write_verl, "trl": write_trl, "skyrl": write_skyrl, "inspect": write_inspect}[command](place)
