"""A stand-in for how slime calls what generates and what rewards."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from slime.utils.misc import load_function
from slime.utils.types import Sample


def load_tokenizer(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("tests put a tokenizer here")


class GenerateState:
    """One for the process, as the real one is."""

    _only: GenerateState | None = None

    def __new__(cls, args: Any) -> GenerateState:
        if cls._only is None:
            cls._only = super().__new__(cls)
            cls._only.tokenizer = load_tokenizer()
            cls._only.aborted = False
        return cls._only

    tokenizer: Any
    aborted: bool

    @classmethod
    def clear_instances(cls) -> None:
        cls._only = None


async def generate_and_rm(args: Any, sample: Sample, sampling_params: Any, evaluation: bool = False) -> Any:
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        return sample
    if GenerateState(args).aborted:
        sample.status = Sample.Status.ABORTED
        return sample
    generate = load_function(args.custom_generate_function_path)
    made = await generate(args, sample, sampling_params, evaluation=evaluation)
    reward = load_function(args.custom_rm_path)
    if isinstance(made, list):
        if not any(one.status == Sample.Status.ABORTED for one in made):
            missing = [one for one in made if one.reward is None]
            for one, earned in zip(missing, await reward(args, missing), strict=True):
                one.reward = earned
    elif made.status != Sample.Status.ABORTED and made.reward is None:
        made.reward = await reward(args, made)
    return made


async def generate_and_rm_group(args: Any, group: Any, sampling_params: Any, evaluation: bool = False) -> Any:
    for sample in group:
        sample.session_id = sample.session_id or str(uuid.uuid4())
    tasks = [generate_and_rm(args, sample, dict(sampling_params), evaluation) for sample in group]
    return list(await asyncio.gather(*tasks))
