"""A task server that dies in the middle of an episode, a model that does not answer in time, a trainer that cancels:
none is a zero, and no episode stays behind on the server.

Each bridge plays the story of several turns on a real task server, and the fault comes in the middle. verl's
real workers meet the same in `test_verl_loop.py`, verifiers' own server and client in `test_verifiers_export.py`, and
the real TRL in `trl_side.py`, `trl_environments_side.py` and `trl_async_side.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import slime_runs
import stories
import vllm_stand_in
from chat_templates import Letters, plain
from serve_process import Running, serve
from stories import STORIES
from trl_speaker import RolloutSample, Speaker, rollout

from treetune.trainers.trl import TrlTasks

STORY = STORIES["several turns"]
DIES, LATE, CANCELS = "the task server dies", "the model does not answer in time", "the trainer cancels"


class Server:
    """`treetune serve` in a process of its own."""

    def __init__(self, running: Running) -> None:
        self.url, self._running = running.report["http"], running

    def kill(self) -> None:
        self._running.process.kill()
        self._running.process.wait()

    @property
    def episodes(self) -> int:
        """Those that are live."""
        with urllib.request.urlopen(f"{self.url}/api/health", timeout=10) as reply:
            return int(json.load(reply)["episodes"])


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    stories.write(folder)
    environment = {"TREETUNE_TASK_CACHE_DIR": str(folder / "cache")}
    with serve(folder, STORY.target, "--http", "127.0.0.1:0", **environment) as running:
        yield Server(running)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory) -> Iterator[Server]:
    """The server of the faults that leave it alive."""
    with served(tmp_path_factory.mktemp("lasting")) as server:
        yield server


@pytest.fixture
def server(fault, tmp_path, monkeypatch, request) -> Iterator[Server]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    stories.write(tmp_path)
    if fault is not DIES:
        yield request.getfixturevalue("lasting")
        return
    with served(tmp_path) as server:
        yield server


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# The bridges: each gives the rewards that its trainer is given.


def by_trl(server: Server, fault: str, patch: pytest.MonkeyPatch) -> list[Any]:
    """Here the trainer samples itself: that it is late or cancelled is an exception of its own."""

    class Faulty(Speaker):
        def _generate_single_turn(self, prompts, *rest):
            if len(self.calls) == 1:
                assert server.episodes == 2
                if fault is DIES:
                    server.kill()
                else:
                    raise TimeoutError("no answer") if fault is LATE else KeyboardInterrupt
            return super()._generate_single_turn(prompts, *rest)

    with TrlTasks(server.url, patience=0.2) as tasks:
        trainer = Faulty(*(f"{text}<end>" for text in STORY.texts))
        try:
            columns = rollout(tasks, trainer, [0] * 2)
        except (TimeoutError, KeyboardInterrupt):
            assert fault is not DIES
            return []
        assert tasks.failures == 2
    # What was said before the end may be kept; a sample without a reward has no advantage.
    return columns["task_reward"]


def by_trl_async(server: Server, fault: str, patch: pytest.MonkeyPatch) -> list[Any]:
    module = ModuleType("trl.experimental.async_grpo.async_rollout_worker")
    module.RolloutSample = RolloutSample  # type: ignore[attr-defined]
    for name in ("trl", "trl.experimental", "trl.experimental.async_grpo"):
        patch.setitem(sys.modules, name, ModuleType(name))
    patch.setitem(sys.modules, module.__name__, module)

    class Killing(TrlTasks):
        """The server dies when the model has said something."""

        def format_agent_output_to_action(self, agent_output, info):
            assert fault is DIES
            server.kill()
            return agent_output

    answers = [stories.letters(Letters(plain), text) for text in STORY.texts]
    with (
        vllm_stand_in.running(Path(), answers) as vllm,
        Killing(server.url, patience=0.2) as tasks,
    ):
        args = SimpleNamespace(
            vllm_server_base_url=vllm.url, vllm_server_timeout=10, request_timeout=1 if fault is LATE else 60,
            num_generations=2, max_completion_length=16, temperature=1.0, top_p=1.0, top_k=0, min_p=None,
            repetition_penalty=1.0, chat_template_kwargs=None, max_inflight_tasks=2, queue_maxsize=8, seed=42,
        )  # fmt: skip
        given = tasks.async_trainer_arguments("MODEL", args, 1, processing_class=Letters(plain))
        worker = given["rollout_worker"]
        vllm.tell(completions=[] if fault is DIES else ["hang"] * 50)
        worker.start()
        if fault is CANCELS:
            until(lambda: server.episodes == 2)
        else:
            until(lambda: (tasks.failures if fault is DIES else worker._unanswered.failures.total()) >= 2)
        worker.stop()
        samples = []
        while not worker.rollout_buffer.empty():
            samples.append(worker.rollout_buffer.get_nowait())
    return [sample.metrics["reward"] for sample in samples]


def by_slime(server: Server, fault: str, patch: pytest.MonkeyPatch) -> list[Any]:
    """slime's own functions where TREETUNE_TEST_SLIME is its source, else what stands in for them."""
    patch.syspath_prepend(slime_runs.SOURCE or str(slime_runs.CALLS.parent / "stand_ins"))
    from slime.rollout import sglang_rollout
    from slime.utils import http_utils

    from treetune.trainers.slime import TreetuneData

    tokenizer = Letters(plain)
    patch.setattr(sglang_rollout, "load_tokenizer", lambda *_, **__: tokenizer)
    patch.setattr(sglang_rollout, "load_processor", lambda *_, **__: None, raising=False)
    sglang_rollout.GenerateState.clear_instances()
    patch.setattr(http_utils, "post", lambda *a, post=http_utils.post, **b: post(*a, max_retries=1, **b))
    answers = [{"ids": stories.letters(tokenizer, text), "text": text} for text in STORY.texts]
    with slime_runs.sglang() as sglang:
        settings = {"urls": [server.url], "patience": 0.5, "model_timeout": 1.0 if fault is LATE else 600.0}
        args = slime_runs.arguments(sglang.address, STORY.target, treetune=settings)
        http_utils.init_http_client(args)
        # The second answer waits until it is let go, or comes never.
        sglang.say(answers[0], {**answers[1], "wait": True} if fault is DIES else {"hang": True}, answers[2])
        (group,) = TreetuneData(args).get_samples(1)

        async def play() -> Any:
            params = {"temperature": 1.0, "max_new_tokens": 100}
            playing = asyncio.ensure_future(sglang_rollout.generate_and_rm(args, group[0], params))
            await asyncio.to_thread(sglang.wait_for, 2)
            assert await asyncio.to_thread(lambda: server.episodes) == 1
            if fault is DIES:
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(urllib.request.urlopen, f"http://{sglang.address}/workers")
            if fault is CANCELS:
                playing.cancel()
            (done,), _ = await asyncio.wait([playing])
            return None if done.cancelled() else done.result()

        sample = slime_runs.run(play())
    if sample is None:
        assert fault is CANCELS
        return []
    assert sample.status.value == "aborted"  # which slime trains on no more
    return [sample.reward]


BRIDGES = {"TRL": by_trl, "TRL async": by_trl_async, "slime": by_slime}


@pytest.mark.parametrize("fault", [DIES, LATE, CANCELS])
@pytest.mark.parametrize("bridge", BRIDGES)
def test_it_is_no_zero_and_no_episode_is_left(bridge, fault, server, monkeypatch):
    rewards = BRIDGES[bridge](server, fault, monkeypatch)
    assert all(reward is None for reward in rewards), rewards
    if fault is not DIES:
        until(lambda: server.episodes == 0)
