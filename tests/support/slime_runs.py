"""slime in tests: the real one from a folder of its source (`TREETUNE_TEST_SLIME`), else the stand-in for it.

    TREETUNE_TEST_SLIME=~/slime TREETUNE_RECORD_SLIME=1 python -m pytest tests/trainers/test_slime.py

records what the real one is given and gives (`slime_calls.json`, with its commit); without the real one, the stand-in
must be given and give the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import task_servers

SOURCE = os.environ.get("TREETUNE_TEST_SLIME", "")
CALLS = Path(__file__).parent / "slime_calls.json"
_FIELDS = (
    "group_index index rollout_id prompt tokens response response_length label reward loss_mask weight_versions "
    "rollout_log_probs remove_sample"
).split()


def put_on_path() -> None:
    sys.path.insert(0, SOURCE or str(Path(__file__).parent / "stand_ins"))


def arguments(address: str, target: str, **given: Any) -> Namespace:
    """Those that slime's own parser makes, as far as a rollout reads them."""
    host, port = address.split(":")
    usual = {
        "prompt_data": target, "n_samples_per_prompt": 1, "rollout_batch_size": 1, "over_sampling_batch_size": 1,
        "hf_checkpoint": "none", "custom_generate_function_path": "treetune.trainers.slime.generate",
        "custom_rm_path": "treetune.trainers.slime.reward", "rollout_function_path": None, "eval_function_path": None,
        "dynamic_sampling_filter_path": None, "custom_reward_post_process_path": None, "eval_datasets": [],
        "sglang_router_ip": host, "sglang_router_port": int(port), "router_policy": "consistent_hashing",
        "sglang_server_concurrency": 64, "rollout_num_engines": 1, "sglang_dp_size": 1, "use_distributed_post": False,
        "rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, "rollout_max_response_len": 4096,
        "rollout_max_context_len": None, "eval_max_context_len": None, "rollout_stop": None,
        "rollout_stop_token_ids": None, "rollout_skip_special_tokens": False, "use_rollout_routing_replay": False,
        "partial_rollout": False, "mask_offpolicy_in_partial_rollout": False, "group_rm": False, "reward_key": None,
        "eval_reward_key": None, "apply_chat_template": False, "apply_chat_template_kwargs": {},
        "multimodal_keys": None, "rollout_seed": 42, "rollout_shuffle": False, "rollout_global_dataset": True,
        "rollout_sample_filter_path": None, "rollout_all_samples_process_path": None, "ci_test": False, "save": None,
        "load": None, "advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": True,
        "eval_max_prompt_len": None, "buffer_filter_path": None, "rm_type": None, "treetune": None,
        "use_wandb": False, "use_tensorboard": False, "wandb_always_use_train_step": False,
        "custom_rollout_log_function_path": None, "custom_eval_rollout_log_function_path": None,
    }  # fmt: skip
    return Namespace(**{**usual, **given})


def run(work: Any) -> Any:
    """On slime's own loop, which all its rollouts share."""
    from slime.utils.async_utils import run as run_in_slime

    return run_in_slime(work)


class Sglang:
    """The fake server, in a process of its own."""

    def __init__(self, address: str) -> None:
        self.address = address

    def say(self, *answers: dict[str, Any]) -> None:
        request = urllib.request.Request(f"http://{self.address}/script", json.dumps(answers).encode())
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request, timeout=10).close()

    @property
    def asked(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"http://{self.address}/asked", timeout=10) as reply:
            return json.load(reply)

    def let_go(self) -> None:
        """Answers to what it was told to wait with."""
        urllib.request.urlopen(f"http://{self.address}/workers", timeout=10).close()

    def wait_for(self, requests: int) -> None:
        """Until so many were made."""
        until = time.monotonic() + 60
        while len(self.asked) < requests:
            assert time.monotonic() < until, f"only {len(self.asked)} requests came"
            time.sleep(0.01)


@contextmanager
def sglang() -> Iterator[Sglang]:
    address = f"127.0.0.1:{task_servers.free_port()}"
    program = str(Path(__file__).parent / "fake_sglang.py")
    with task_servers.process(program, address.split(":")[1], url=f"http://{address}", path="/asked"):
        yield Sglang(address)


_OURS = ("treetune_row", "treetune_credit", "metrics")
"""Metadata that slime neither reads nor changes."""


def told(asked: list[dict[str, Any]], samples: Any) -> dict[str, Any]:
    """What went to SGLang and came back to slime, without what differs from run to run."""
    sessions = list(dict.fromkeys(each["session"] for each in asked))
    flat = [sample for one in samples for sample in (one if isinstance(one, list) else [one])]
    requests = [{**each, "session": sessions.index(each["session"])} for each in asked]
    return {
        "asked": sorted(requests, key=lambda each: each["session"]),
        "samples": [
            {
                **{name: getattr(sample, name) for name in _FIELDS},
                "status": sample.status.value,
                "metadata": {key: value for key, value in sample.metadata.items() if key not in _OURS},
            }
            for sample in flat
        ],
    }


def compare(name: str, found: dict[str, Any]) -> None:
    """With what was recorded of the real slime; or records it."""
    found = json.loads(json.dumps(found))
    recorded = json.loads(CALLS.read_text()) if CALLS.exists() else {"commit": None, "calls": {}}
    if os.environ.get("TREETUNE_RECORD_SLIME"):
        assert SOURCE, "only the real slime is recorded"
        recorded["commit"] = os.environ["TREETUNE_RECORD_SLIME"]
        recorded["calls"][name] = found
        CALLS.write_text(json.dumps(recorded, sort_keys=True) + "\n")
    else:
        assert found == recorded["calls"][name]
