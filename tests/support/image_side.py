"""Runs in a trainer's virtual environment, and says what the real trainer makes of rows with images.

    python image_side.py verl|trl|trl_tasks|skyrl TOKENIZER FILE

Prints one JSON object for each row: the text, how many tokens of it are images, the colours that the model is given.
"""

from __future__ import annotations

import json
import sys
import typing
from typing import Any

import typing_extensions
from vision_processor import make_processor, make_tokenizer

# SkyRL 0.3 gives pydantic a `typing.TypedDict`, which pydantic refuses before Python 3.12.
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]


def seen(processor: Any, inputs: Any) -> dict[str, Any]:
    """What goes into a model: token ids, and the pixels of the images."""
    ids = inputs["input_ids"][0].tolist()
    colours = [pixels.float().mean(dim=(1, 2)).round().int().tolist() for pixels in inputs["pixel_values"]]
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    text = processor.tokenizer.decode([id for id in ids if id != image])
    return {"text": text, "image_tokens": ids.count(image), "colours": colours}


def verl(folder: str, file: str) -> list[dict[str, Any]]:
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
    from verl.utils.tokenizer import build_multimodal_processor_inputs

    processor = make_processor(folder)
    # Counting tokens goes through qwen_vl_utils, which needs torchvision: the trainer's machine has it.
    config = OmegaConf.create({"filter_overlong_prompts": False})
    dataset = RLHFDataset(file, processor.tokenizer, config, processor=processor)
    items = [dataset[number] for number in range(len(dataset))]
    batch = collate_fn(items)
    answers = []
    for item, uid in zip(items, [extra["uid"] for extra in batch["extra_info"]], strict=True):
        messages = item["raw_prompt"]
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        images = [part["image"] for part in parts if part["type"] == "image"]
        inputs = build_multimodal_processor_inputs(processor, text=[text], images=images)
        answers.append({"uid": uid, "rewards": score(item), **seen(processor, inputs)})
    return answers


def score(item: dict[str, Any]) -> list[float]:
    """As verl's reward manager asks for it: of the right answer, and of a wrong one."""
    from treetune.trainers.verl import compute_score

    truth = item["reward_model"]["ground_truth"]
    scores = [compute_score(item["data_source"], answer, truth, item["extra_info"]) for answer in (truth, "perhaps")]
    return [found["score"] if isinstance(found, dict) else found for found in scores]


def trl(folder: str, file: str) -> list[dict[str, Any]]:
    from trl.data_utils import prepare_multimodal_messages

    from datasets import load_dataset
    from treetune.trainers.trl import score_rows

    processor = make_processor(folder)
    kind = "parquet" if file.endswith(".parquet") else "json"
    answers = []
    for row in load_dataset(kind, data_files=file, split="train"):
        # As GRPOTrainer does in `_generate_and_score_completions` and `_tokenize_prompts`.
        messages = prepare_multimodal_messages(row["prompt"], images=row["images"])
        inputs = processor.apply_chat_template(
            [messages], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        columns = {name: [value] for name, value in row.items() if name not in ("prompt", "images")}
        completions = [[{"role": "assistant", "content": row["ground_truth"]}]]
        rewards = score_rows(prompts=[row["prompt"]], completions=completions, **columns)
        answers.append({"uid": row["extra_info"]["uid"], "rewards": rewards, **seen(processor, inputs)})
    return answers


def trl_tasks(folder: str, target: str) -> list[dict[str, Any]]:
    """Tasks without files, as `TrlTasks` gives them to a trainer that samples by itself."""
    from trl.data_utils import prepare_multimodal_messages

    from treetune.trainers.trl import TrlTasks

    processor = make_processor(folder)
    answers = []
    with TrlTasks(target) as tasks:
        for row in tasks.dataset():
            messages = prepare_multimodal_messages(row["prompt"], images=row["images"])
            inputs = processor.apply_chat_template(
                [messages], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
            said = [[{"role": "assistant", "content": "yes"}]]
            rewards = tasks.reward(prompts=[messages], completions=said, task_index=[row["task_index"]])
            answers.append({"rewards": rewards, **seen(processor, inputs)})
    return answers


def skyrl(folder: str, file: str) -> list[dict[str, Any]]:
    from skyrl.train.dataset import PromptDataset

    from treetune.trainers.skyrl import PromptDataset as OurDataset

    tokenizer = make_tokenizer(folder)
    theirs, ours = PromptDataset(file, tokenizer, 1000, num_workers=1), OurDataset(file, tokenizer, 1000, quiet=True)
    answers = []
    for item, own in zip(theirs.collate_fn([theirs[n] for n in range(len(theirs))]), ours, strict=True):
        # What its multimodal generator posts to the server that renders it.
        messages = json.loads(json.dumps(item["prompt"]))
        uid = item["env_extras"]["extra_info"]["uid"]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        answers.append({"uid": uid, "text": text, "messages": messages, "own": own["prompt"], "own_uid": own["uid"]})
    return answers


SIDES = {"verl": verl, "trl": trl, "trl_tasks": trl_tasks, "skyrl": skyrl}

if __name__ == "__main__":
    which, tokenizer, rows = sys.argv[1:]
    for answer in SIDES[which](tokenizer, rows):
        print("ANSWER", json.dumps(answer))
