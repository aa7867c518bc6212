"""Runs as other programs write them: each command is run in that program's virtual environment, by its own classes.

    python foreign_side.py verl|trl|skyrl|inspect|harbor FOLDER

The files in tests/runs/recorded were written by these commands; `tests/runs/test_foreign_real.py` runs them again.
Every program records the same sums: two prompts, two answers of each, in two steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

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
    """What it dumps of evaluations, also of one by steps; and of a batch that it trains on."""
    from skyrl_side import allow_typed_dicts

    allow_typed_dicts()
    import torch
    from real_letters import letters_tokenizer
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
    from skyrl.train.trainer import RayPPOTrainer
    from skyrl.train.utils.trainer_utils import dump_per_dataset_eval_results

    tokenizer = letters_tokenizer()
    prompts, truths, answers, rewards = map(list, zip(*rows(), strict=True))
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rendered = [tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False) for each in asked]
    said = [f"{answer}<|im_end|>" for answer in answers]
    # The second answer has a turn of the environment in it.
    more = "<|im_end|>\n<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\n"
    said[1] = f"7{more}6<|im_end|>"

    def dump(name, prompts, responses, rewards, truths, stops):
        place = folder / "dumped_evals" / name
        place.mkdir(parents=True)
        output = {
            "prompt_token_ids": [tokenizer(each)["input_ids"] for each in prompts],
            "response_ids": [tokenizer(each)["input_ids"] for each in responses],
            "rewards": rewards,
            "stop_reasons": stops,
        }
        extras = [{"data_source": "a/sums", "reward_spec": {"ground_truth": truth}} for truth in truths]
        sources = [extra["data_source"] for extra in extras]
        environments = ["sums"] * len(prompts)
        dump_per_dataset_eval_results(place, tokenizer, output, sources, environments, extras, {"eval/all": 0.75})

    for step in (5, 10):
        dump(f"global_step_{step}_evals", rendered, said, rewards, truths, ["stop", "length", "stop", "stop"])
    first, rest = said[1].split(more)
    steps = [rendered[1], f"{rendered[1]}{first}{more}", rendered[2]]
    by_token = [[0.0] * 3, [0.0, 0.5], [1.0]]
    dump("eval_only", steps, [first, rest, said[2]], by_token, ["5", "5", "8"], ["stop"] * 3)

    asked_ids, said_ids = ([tokenizer(each)["input_ids"] for each in texts] for texts in (rendered, said))
    masks = [[1] * len(each) for each in said_ids]
    masks[1][2:-2] = [0] * (len(masks[1]) - 4)  # what the environment said is not trained on
    names = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask", "rollout_logprobs")
    tensors = convert_prompts_responses_to_batch_tensors(
        *(tokenizer, asked_ids, said_ids, [[0.0] * len(each) for each in said_ids], masks),
        logprobs=[[-0.5] * len(each) for each in said_ids],
    )
    batch = TrainingInputBatch(dict(zip(names, tensors, strict=False)))
    batch.pop("rewards")  # as its trainer does
    batch["advantages"] = torch.tensor([[0.7], [-0.7], [0.0], [0.0]]) * batch["response_mask"]
    batch["values"] = None
    length = batch["response_mask"].shape[1]
    batch.metadata = {"response_length": length, "policy_prompt_boundaries": [(0, 2), (2, 4)]}
    trainer = object.__new__(RayPPOTrainer)
    trainer.cfg = SimpleNamespace(trainer=SimpleNamespace(export_path=str(folder)))
    trainer.dump_data(batch, "global_step_1_training_input")


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


def write_harbor(folder: Path) -> None:
    """A job: a trial that solved its task, one that ran out of time, and one whose machine did not start."""
    import typing

    import typing_extensions

    # Harbor asks for Python 3.12, for no more than these names.
    typing.TypedDict, typing.override = typing_extensions.TypedDict, typing_extensions.override
    from harbor.models.task.id import LocalTaskId
    from harbor.models.trajectories import Trajectory
    from harbor.models.trial.config import TrialConfig
    from harbor.models.trial.paths import TrialPaths
    from harbor.models.trial.result import AgentInfo, ExceptionInfo, TrialResult
    from harbor.utils.trajectory_utils import format_trajectory_json

    def metrics(given, sampled):
        tokens = {"prompt_token_ids": given, "completion_token_ids": sampled, "logprobs": [-0.5] * len(sampled)}
        return {"prompt_tokens": len(given), "completion_tokens": len(sampled), **tokens}

    call = {"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "echo 5"}}
    asked = {"step_id": 1, "source": "user", "message": "Write 2 + 3 to answer.txt."}
    steps = [
        asked,
        {
            "step_id": 2, "source": "agent", "message": "I look.", "reasoning_content": "It is 5.",
            "tool_calls": [call], "observation": {"results": [{"source_call_id": "c1", "content": "5"}]},
            "metrics": metrics([1, 2, 3], [4, 5]),
        },
        {"step_id": 3, "source": "agent", "message": "Done.", "metrics": metrics([1, 2, 3, 4, 5, 6], [7])},
    ]  # fmt: skip
    shown = {"type": "image", "source": {"media_type": "image/png", "path": "images/1.png"}}
    slow = [
        asked,
        {"step_id": 2, "source": "agent", "message": [{"type": "text", "text": "Hm."}, shown]},
    ]
    more = [
        {**asked, "is_copied_context": True},
        {"step_id": 2, "source": "agent", "message": "Still thinking.", "llm_call_count": 1},
    ]
    agent = {"name": "terminus-2", "version": "1.0", "model_name": "some/model"}
    late = ExceptionInfo(
        exception_type="AgentTimeoutError", exception_message="after 10 s", exception_traceback="Traceback: ...",
        occurred_at="2026-11-01T10:00:10Z",
    )  # fmt: skip
    broken = late.model_copy(update={"exception_type": "EnvironmentStartTimeoutError"})

    def trial(name, task, reward, exception, trajectories):
        paths = TrialPaths(folder / "job" / name)
        paths.agent_dir.mkdir(parents=True)
        for file, trajectory in trajectories.items():
            checked = Trajectory.model_validate({"agent": agent, "session_id": name, **trajectory})
            (paths.agent_dir / file).write_text(format_trajectory_json(checked.to_json_dict()))
        place = Path("tasks") / task
        result = TrialResult(
            task_name=task, trial_name=name, trial_uri=f"file:///job/{name}", task_id=LocalTaskId(path=place),
            source="sums", task_checksum=f"checksum of {task}", config=TrialConfig(task={"path": place}),
            agent_info=AgentInfo(name="terminus-2", version="1.0"), exception_info=exception,
            verifier_result=None if reward is None else {"rewards": {"reward": reward, "style": 0.5}},
            started_at="2026-11-01T10:00:00Z", finished_at="2026-11-01T10:00:12Z",
        )  # fmt: skip
        paths.result_path.write_text(result.model_dump_json(indent=4))

    trial("add__a1", "add", 1.0, None, {"trajectory.json": {"steps": steps}})
    parts = {
        "trajectory.json": {"steps": slow, "continued_trajectory_ref": "trajectory.cont-1.json"},
        "trajectory.cont-1.json": {"steps": more},
    }
    trial("add__b2", "add", 0.0, late, parts)
    trial("other__c3", "other", None, broken, {})


WRITERS = {
    "verl": write_verl,
    "trl": write_trl,
    "skyrl": write_skyrl,
    "inspect": write_inspect,
    "harbor": write_harbor,
}

if __name__ == "__main__":
    WRITERS[sys.argv[1]](Path(sys.argv[2]))
