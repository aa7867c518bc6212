"""Rollouts of a GRPOTrainer: all processes sample in step, and all episodes of a batch are played together."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import suppress
from types import coroutine
from typing import Any

from treetune.chat.tokens import TokenSequence
from treetune.errors import CreditError, UsageError
from treetune.trainers.agents import ONE_ROW
from treetune.trainers.config import get_value
from treetune.trainers.credit import Row, check_loss
from treetune.trainers.token_episode import PlayedEpisode, Sampled, TokenEpisode
from treetune.trainers.trl.columns import task_index_of

Generate = Callable[[list[list[int]], Any], tuple[list[list[int]], list[list[float]] | None]]
"""Samples one answer to each prompt: (prompts in tokens, the trainer) -> (tokens sampled, their logprobs if known)."""

CREDIT = "turn_credit"
"""The column with what the advantages of an episode need, for `EpisodeTrainer`."""

_OF_EPISODES = {
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": None,
    "multi_objective_aggregation": "sum_then_normalize",
}
"""Keys of GRPOConfig that may treat an episode as a whole, and the values that do not."""

_Playing = Coroutine[Any, Any, None]


def pad_to_longest_batch(prompts: list[list[int]], trainer: Any) -> list[list[int]]:
    """Pad the prompts to the longest batch of all processes. With vLLM as a server or sharded weights, all processes
    must sample equally often and equally many answers. Spare answers are not used."""
    if getattr(getattr(trainer, "accelerator", None), "num_processes", 1) == 1:
        return prompts
    from accelerate.utils import gather_object

    most: int = max(gather_object([len(prompts)]))
    spare = prompts[:1] or [[trainer.processing_class.pad_token_id]]
    return prompts + spare * (most - len(prompts))


def sample_by_trainer(prompts: list[list[int]], trainer: Any) -> tuple[list[list[int]], list[list[float]] | None]:
    sample = getattr(trainer, "_generate_single_turn", None)
    if sample is None:
        raise UsageError("this TRL samples differently from TRL 1.16", remedy="pass generate=... to TrlTasks")
    completions, logprobs = sample(prompts, None, {}, 1)
    return completions, logprobs


def play_together(
    episodes: Sequence[TokenEpisode], generate: Generate, step_many: Callable[[list[Any]], list[Any]], trainer: Any
) -> None:
    """Play all episodes at once, with `hand_over` as their sampler: one turn of each forms one batch for the trainer.
    Hooks may block, so they run in the caller's thread; `step_many` plays (episode, action) pairs elsewhere."""
    asking = _resume((_play(episode), None) for episode in episodes)
    while prompts := pad_to_longest_batch([prompt.ids for _, prompt in asking], trainer):
        sampled, logprobs = generate(prompts, trainer)
        answers = (
            (playing, Sampled(sampled[at], None if logprobs is None else logprobs[at]))
            for at, (playing, _) in enumerate(asking)
        )
        moving = _resume(answers)
        steps = step_many([move for _, move in moving])
        asking = _resume((playing, step) for (playing, _), step in zip(moving, steps, strict=True))


@coroutine
def hand_over(asked: Any) -> Generator[Any, Any, Any]:
    """Suspend an episode, hand its request to `play_together`, and continue with the reply."""
    return (yield asked)


async def _play(episode: TokenEpisode) -> None:
    await episode.play(lambda action: hand_over((episode.episode, action)))


def _resume(replies: Iterable[tuple[_Playing, Any]]) -> list[tuple[_Playing, Any]]:
    """Send each episode its reply; return those that continue, with their next request."""
    going = []
    for playing, reply in replies:
        with suppress(StopIteration):
            going.append((playing, playing.send(reply)))
    return going


def longest_prompt(trainer: Any) -> int | None:
    """Return the longest prompt that leaves room for an answer."""
    config = trainer.model.config
    trained: int | None = getattr(getattr(config, "text_config", config), "max_position_embeddings", None)
    limits = [limit for limit in (trained, getattr(trainer.args, "vllm_max_model_length", None)) if limit]
    if not limits:
        return None
    answer: int = trainer.args.max_completion_length or 1
    if answer >= min(limits):
        raise UsageError(
            f"answers of {answer} tokens leave no room for a prompt in a context of {min(limits)}",
            remedy="lower max_completion_length in GRPOConfig: it applies to one turn",
        )
    return min(limits) - answer


def check_turn_credit(episodes: Sequence[TokenEpisode], trainer: Any) -> None:
    """Raise if the tasks of a batch have credit by turn, and the trainer cannot give it."""
    if all(each.contract.credit != "turn" or each.contract.turns == 1 for each in episodes):
        return
    check = getattr(trainer, "check_turn_credit", None)
    if check is None:
        problem = f"the tasks have credit: turn, and {type(trainer).__name__} has one advantage for an episode"
        raise CreditError(problem, remedy="use EpisodeTrainer of treetune.trainers.trl.episode_trainer instead")
    check()


def check_settings(config: Any) -> None:
    """Raise if credit by turn is not possible with these settings, whose missing keys have TRL's defaults."""
    if (loss := get_value(config, "loss_type")) is not None:
        check_loss(loss)
    for name, of_tokens in _OF_EPISODES.items():
        if (value := get_value(config, name)) not in (None, of_tokens):
            problem = f"{name}={value} treats an episode as a whole, and the tasks have credit: turn"
            raise CreditError(problem, remedy=f"leave {name} out")
    budget = get_value(config, "token_budget")
    if budget is not None and not (str(budget).isdecimal() and int(budget)):
        problem = f"token_budget={budget} counts samples, and with credit: turn an episode has one for each turn"
        raise CreditError(problem, remedy="leave token_budget out, or set it to the tokens of a micro-batch")


def check_episodes(episodes: Sequence[TokenEpisode], warn: Callable[[str], None]) -> None:
    """Raise if an episode became several rows; warn if an agent's did."""
    for each in episodes:
        count = len(each.tokens.sequences)
        if each.record is None:
            check_rows(count)
        elif count > 1:
            warn(ONE_ROW.format(left=f"{count - 1} others of an episode"))


def check_rows(count: int) -> None:
    """Raise if an episode became several rows."""
    if count > 1:
        problem = f"the chat template or a hook rewrote history: an episode became {count} rows, GRPOTrainer takes one"
        raise CreditError(problem, remedy="use AsyncGRPO (trainer=async), or do not change what was said")


def groups_of(episodes: Sequence[TokenEpisode], prompts: Sequence[Any], trainer: Any) -> list[list[TokenEpisode]]:
    """Return the groups of a batch whose tasks are scored together: a trainer's batch has the rollouts of a prompt next
    to each other. Raises if a group is divided between processes."""
    if not any(each.contract.group_score for each in episodes):
        return []
    evaluates = not getattr(trainer.model, "training", True) and getattr(trainer, "num_generations_eval", None)
    size = evaluates or trainer.num_generations
    groups = [list(episodes[first : first + size]) for first in range(0, len(episodes), size)]
    tasks = list(map(task_index_of, prompts))
    if len(tasks) % size or any(tasks[at] != tasks[at - at % size] for at in range(len(tasks))):
        raise UsageError(
            f"the {size} rollouts of a task are scored together, and are divided between processes",
            remedy="set per_device_train_batch_size to a multiple of num_generations",
        )
    return groups


def columns_of(episodes: list[TokenEpisode], end_token: int) -> dict[str, Any]:
    """Return TRL's columns: the prompt is everything before the first sampled token, the completion is the rest."""
    rows = [_tokens_of(each, end_token) for each in episodes]
    starts = [row.mask.index(1) if 1 in row.mask else len(row.ids) - 1 for row in rows]
    cut = list(zip(rows, starts, strict=True))
    rewards = [each.reward for each in episodes]
    with_logprobs = all(row.logprobs for row in rows)
    return {
        "prompt_ids": [row.ids[:start] for row, start in cut],
        "completion_ids": [row.ids[start:] for row, start in cut],
        "logprobs": [row.logprobs[start:] for row, start in cut] if with_logprobs else None,
        "env_mask": [row.mask[start:] for row, start in cut],
        "task_reward": rewards,
        "task_metrics": [metrics_of(each, each.turns) for each in episodes],
        "num_turns": [each.turns for each in episodes],
        "turn_rewards": [each.rewards for each in episodes],
        CREDIT: list(map(_credit_of, episodes, rows, starts, rewards)),
    }


def _credit_of(played: TokenEpisode, row: TokenSequence, start: int, reward: float | None) -> Row:
    spans = [(turn, max(0, first - start), max(0, end - start)) for turn, first, end in row.spans]
    rewards = [] if reward is None else rewards_of(played, reward)
    return Row(0, 0, rewards, spans, len(row.ids) - start, *played.contract.turn_credit)


def rewards_of(played: TokenEpisode, reward: float) -> list[float]:
    """Return the rewards of the turns of an episode with this reward."""
    if played.contract.credit == "turn":
        return played.shape_each(played.turns)
    return [0.0] * (len(played.rewards) - 1) + [reward]


def metrics_of(played: PlayedEpisode | None, turns: int) -> dict[str, float]:
    """Return what TRL logs of an episode of this many turns; nothing if it was lost."""
    return {} if played is None or played.failure is not None else {**played.metrics, "num_turns": float(turns)}


def _tokens_of(played: TokenEpisode, end_token: int) -> TokenSequence:
    """Return the tokens to train on. TRL has one row per prompt: of several sequences, the last one is used."""
    if played.tokens.sequences:
        return played.tokens.sequences[-1]
    # No answer was given, but TRL needs a token: this one is masked out.
    ids = [*(played.prompt.ids or [end_token]), end_token]
    return TokenSequence(ids=ids, mask=[0] * len(ids), logprobs=[0.0] * len(ids))
