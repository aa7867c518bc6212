"""Real trainings on a CPU, all of one task: `examples/every_trainer`. Tests take two steps, the docs' curves more.

    training = CpuTraining(folder)
    training.verl("Letters", steps=2)          # [{"reward": 0.41, ...}, {...}]

Every trainer is started as a user would start it, in its own virtual environment. What each gives is a list of steps:
the mean reward, and what says that the step was real.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import venvs
import vllm_server

ROOT = Path(__file__).parents[2]
SUPPORT, TASK = ROOT / "tests" / "support", ROOT / "examples" / "every_trainer"
PROMPTS, GROUP, RATE, MOST_TOKENS = 4, 4, 3e-3, 12
"""Of every trainer: tasks in a step, episodes of each, the learning rate, and the tokens of one answer."""

VALIDATED = 8
Until = Callable[[], bool] | None

VERL_ON_CPU = {
    "data.dataloader_num_workers": 0,
    "data.max_prompt_length": 64,
    "data.max_response_length": 64,
    "actor_rollout_ref.model.use_remove_padding": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.use_dynamic_bsz": False,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision": "{param_dtype: fp32, reduce_dtype: fp32}",
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.load_format": "auto",
    "actor_rollout_ref.rollout.enforce_eager": True,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "+actor_rollout_ref.rollout.enable_sleep_mode": False,
    "actor_rollout_ref.rollout.max_model_len": 256,
    "actor_rollout_ref.rollout.max_num_batched_tokens": 4096,  # all prompts whole: vLLM cannot undo a draw on a CPU
    "actor_rollout_ref.rollout.max_num_seqs": 16,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 16,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "reward.num_workers": 1,
    "trainer.device": "cpu",
    "trainer.logger": "[console,file]",
    "ray_kwargs.ray_init.num_cpus": 16,
    "+ray_kwargs.ray_init.num_gpus": 1,
    "+ray_kwargs.ray_init.include_dashboard": False,
}
"""verl's keys for a machine without a GPU: single precision, nothing compiled, one process of each kind."""

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A busy machine takes longer than Ray waits for its own processes, which would let all others go first.
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "600000",
}


class CpuTraining:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._caches = {"TREETUNE_TASK_CACHE_DIR": str(folder / "cache"), "HF_HOME": str(folder / "library")}

    @cached_property
    def work(self) -> Path:
        """A user's folder, with the task in it."""
        place = self.folder / "work"
        place.mkdir()
        shutil.copy(TASK / "letters.py", place)
        return place

    @cached_property
    def model(self) -> Path:
        """The tiny model, as its warm-up left it."""
        place = self.folder / "model"
        venvs.run(venvs.vllm_verl(), TASK / "tiny.py", place)
        return place

    @cached_property
    def forgetful(self) -> Path:
        """The tiny model with a chat template that shows only the beginning of earlier answers: each episode with a
        longer one becomes several rows."""
        place = self.folder / "forgetful"
        shutil.copytree(self.model, place)
        template = place / "chat_template.jinja"
        shown = "(message['content'][:3] if message['role'] == 'assistant' else message['content'])"
        template.write_text(template.read_text().replace("message['content']", shown))
        return place

    @contextlib.contextmanager
    def vllm(self) -> Iterator[tuple[str, Path]]:
        """The address of a vLLM, and the folder of the model that it has: a copy, which trainings may change."""
        served = self.folder / "served"
        shutil.copytree(self.model, served)
        with vllm_server.vllm_server(venvs.vllm_verl(), served, self.folder / "vllm.log") as url:
            yield url, served

    # One after the other: there are two cores

    def verl(
        self,
        task: str,
        steps: int,
        *options: str | Path,
        until: Until = None,
        file: str = "letters.py",
        **others: Any,
    ) -> list[dict[str, Any]]:
        """verl's own figures of each step, and the rows that it trained on in `rollouts`. `others` are keys of verl."""
        logger = self.folder / f"verl-{task}-{len(options)}.jsonl"  # a resumed training has one of its own
        settings = {
            "data.train_batch_size": PROMPTS,
            "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
            "actor_rollout_ref.rollout.n": GROUP,
            "actor_rollout_ref.actor.optim.lr": RATE,
            "hydra.run.dir": self.folder / "hydra",
            **VERL_ON_CPU,
            **others,
        }
        words = [f"{key}={value}" for key, value in settings.items()]
        target = ("verl", f"{file}:{task}", "--steps", steps, "--val", VALIDATED, "--model", self.model)
        with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as short:
            self._train(
                *(venvs.vllm_verl(), *target, *options, *words),
                until=until,
                VERL_USE_EXTERNAL_MODULES="verl_cpu_platform",
                VERL_ENGINE_DEVICE="cuda",
                VERL_FILE_LOGGER_PATH=str(logger),
                RAY_TMPDIR=short,  # so that no other cluster is found; its sockets need a short path
                **RAY,
                **vllm_server.ENVIRONMENT,
            )
        lines = map(json.loads, logger.read_text().splitlines())
        steps_seen = {line["step"]: line["data"] for line in lines if "critic/score/mean" in line["data"]}
        run = self.work / options[1] if options[:1] == ("-o",) else self.run("verl", task)
        for number, step in steps_seen.items():
            rows = (run / "rollouts" / f"{number}.jsonl").read_text().splitlines()
            step["rollouts"] = [json.loads(row) for row in rows]
            step["reward"] = step["critic/score/mean"]
        return list(steps_seen.values())

    def run(self, trainer: str, task: str) -> Path | None:
        """The run folder of a training, which has named it; None before that."""
        for plan in self.work.glob("runs/train-*/plan.json"):
            began = json.loads(plan.read_text())
            if began["trainer"] == trainer and began["target"].endswith(f":{task}"):
                return plan.parent
        return None

    def trl_to_the_end(self, task: str, steps: int, *options: str, until: Until = None) -> None:
        """GRPO as a user would start it, in one thread, because the sums of several have no fixed order."""
        words = ("-n", 64, "--val", VALIDATED, "--steps", steps, "--model", self.model)
        keys = (f"max_completion_length={MOST_TOKENS}", f"learning_rate={RATE}", "disable_tqdm=true")
        target = ("trl", f"letters.py:{task}", *words, *options, *keys)
        self._train(venvs.venv(*venvs.TRL), *target, until=until, OMP_NUM_THREADS="1")

    def trl(self, steps: int, vllm: tuple[str, Path] | None = None) -> dict[str, Any]:
        """GRPO, or AsyncGRPO where there is a vLLM; what `trl_cpu_side.py` says of it."""
        url, model = vllm or (None, self.model)
        settings = {
            "per_device_train_batch_size": PROMPTS * GROUP,
            "gradient_accumulation_steps": 1,
            "num_generations": GROUP,
            "max_completion_length": MOST_TOKENS,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "save_strategy": "no",
            "disable_tqdm": "true",
            "gradient_checkpointing": "false",
            "dataloader_pin_memory": "false",
        }
        if url:
            settings |= {"trainer": "async", "vllm_server_base_url": url, "max_staleness": 0, "weight_sync_steps": 1}
            settings |= {"max_inflight_tasks": PROMPTS * GROUP, "dtype": "float32", "token_budget": -1}
        words = [f"{key}={value}" for key, value in settings.items()]
        named = ("-o", self.folder / ("trl-async" if url else "trl"))
        target = ("train", "trl", "letters.py:Letters", "-n", "256", "--steps", steps, "--model", model)
        planned = self._treetune(venvs.venv(*venvs.TRL), *target, *named, *words, "--dry-run", "--json")
        plan = json.loads(planned)
        python, _, module, *rest = plan["command"]
        assert module == "treetune.trainers.trl"
        answer = self.folder / "trl.json"
        venvs.run(
            *(Path(python), SUPPORT / "trl_cpu_side.py", answer, *rest),
            cwd=TASK, timeout=1200, PYTHONPATH=str(SUPPORT), TRL_EXPERIMENTAL_SILENCE="1", **self._caches,
            **plan["environment"],
        )  # fmt: skip
        return {**json.loads(answer.read_text()), "run": Path(plan["run"])}

    def skyrl(self, steps: int) -> list[dict[str, Any]]:
        """SkyRL's generator over rows that were built for it, and its JAX backend through its Tinker API."""
        python = venvs.venv(*venvs.SKYRL_TINKER)
        arguments = ("train", "skyrl", "letters.py:Letters", "--dry-run", "--json")
        planned = json.loads(self._treetune(python, *arguments))
        words = planned["command"]
        request, answer = self.folder / "skyrl-request.json", self.folder / "skyrl.json"
        asked = {
            "model": str(self.model),
            "files": planned["data"]["train"],
            "rollouts": str(self.folder / "skyrl-rollouts"),
            "register": [id for option, id in pairwise(words) if option == "--env"],
            "steps": steps,
            "prompts": PROMPTS,
            "group": GROUP,
            "rank": 8,
            "learning_rate": RATE,
            "max_tokens": MOST_TOKENS,
        }
        request.write_text(json.dumps(asked))
        venvs.run(
            *(python, SUPPORT / "skyrl_tinker_side.py", request, answer),
            cwd=TASK, timeout=1200, PYTHONPATH=str(SUPPORT), **self._caches,
        )  # fmt: skip
        found: list[dict[str, Any]] = json.loads(answer.read_text())
        return found

    def verifiers(self, steps: int, vllm: tuple[str, Path], rendered: Path | None = None) -> list[dict[str, Any]]:
        """An exported package in verifiers' own server, with its client for training; the steps are plain torch. The
        client renders chats by the template of the model, or of another folder."""
        url, model = vllm
        python, package = venvs.venv(*venvs.VERIFIERS), self.folder / "letters-env"
        self._treetune(python, "export", "verifiers", "letters.py:Letters", "--to", package)
        (name,) = (file.parent.name for file in package.glob("*/__init__.py"))
        words = ("sample", name, url, model, str(PROMPTS), str(GROUP), rendered or model)
        path = os.pathsep.join([str(SUPPORT), str(package)])
        steps_of = (venvs.vllm_verl(), SUPPORT / "policy_step.py", model, str(GROUP), str(RATE))
        found = []
        vllm_server.load_again(url)  # whoever trained before may have left other weights in the engine than on disk
        with (
            self._asking(python, SUPPORT / "verifiers_side.py", *words, PYTHONPATH=path) as play,
            self._asking(*steps_of) as take_step,
        ):
            for step in range(steps):
                rollouts = play(step * PROMPTS)
                found.append({**take_step(rollouts), "rollouts": rollouts})
                vllm_server.load_again(url)
        return found

    @contextlib.contextmanager
    def _asking(self, python: Path, program: Path, *words: str | Path, **environment: str) -> Iterator[Any]:
        """A function that asks a program, which answers each line of JSON with another."""
        log = self.folder / f"{program.stem}.log"
        path = os.pathsep.join([str(ROOT / "src"), environment.pop("PYTHONPATH", "")])
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", **self._caches, **environment, "PYTHONPATH": path}
        with (
            log.open("w") as printed,
            subprocess.Popen(
                [python, program, *words],
                cwd=TASK,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                bufsize=1,  # a line is sent as soon as it is written
            ) as running,
        ):

            def ask(question: Any) -> Any:
                running.stdin.write(json.dumps(question) + "\n")
                answer = running.stdout.readline()
                assert answer, f"{program.name} has ended:\n{log.read_text()[-6000:]}"
                return json.loads(answer)

            try:
                yield ask
            finally:
                running.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(30)
                running.kill()

    def _train(self, python: Path, *arguments: Any, until: Until, **environment: str) -> None:
        """`treetune train ARGUMENTS` in the folder of the user: to its end, or until something is true, and then killed
        with all of its processes."""
        path = os.pathsep.join([str(ROOT / "src"), str(SUPPORT)])
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", **self._caches, **environment, "PYTHONPATH": path}
        command = [python, "-m", "treetune", "train", *map(str, arguments)]
        log = self.folder / "train.log"
        options = {"cwd": self.work, "env": variables, "stderr": subprocess.STDOUT, "start_new_session": True}
        with log.open("w") as printed, subprocess.Popen(command, stdout=printed, **options) as running:
            try:
                if until is None:
                    running.wait(2400)
                while until is not None and running.poll() is None and not until():
                    time.sleep(0.1)
                assert running.poll() == (0 if until is None else None), log.read_text()[-6000:]
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)

    def _treetune(self, python: Path, *arguments: str | Path, log: Path | None = None, **environment: str) -> str:
        """`treetune ARGUMENTS` where the task is; what it prints, in the end or into a file."""
        path = os.pathsep.join([str(ROOT / "src"), str(SUPPORT)])
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", **self._caches, **environment, "PYTHONPATH": path}
        command = [python, "-m", "treetune", *map(str, arguments)]
        with (log or self.folder / "treetune.log").open("w+") as printed:
            out = subprocess.PIPE if log is None else printed
            done = subprocess.run(command, cwd=TASK, env=variables, stdout=out, stderr=printed, text=True, timeout=2400)
            printed.seek(0)
            assert done.returncode == 0, f"{arguments}:\n{printed.read()[-6000:]}"
        return done.stdout or ""


# The curves of the docs


def measure(folder: Path, results: Path, steps: dict[str, int]) -> None:
    """Trains with each of the named, and writes its rewards to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    training = CpuTraining(folder)
    results.mkdir(parents=True, exist_ok=True)

    def keep(name: str, rewards: list[float]) -> None:
        found = {"trainer": name, "rewards": [round(reward, 4) for reward in rewards]}
        (results / f"{name.partition(',')[0].replace(' ', '-').lower()}.json").write_text(json.dumps(found) + "\n")

    if number := steps.get("verl"):
        keep("verl 0.9.1", [step["reward"] for step in training.verl("Letters", number)])
    if number := steps.get("trl"):
        keep("TRL 1.16", [log["reward"] for log in training.trl(number)["logs"]])
    if number := steps.get("skyrl"):
        keep("SkyRL 0.3, JAX", [step["reward"] for step in training.skyrl(number)])
    if number := steps.get("async"):
        with training.vllm() as server:
            keep("TRL 1.16 async", [log["reward"] for log in training.trl(number, server)["logs"]])
    if number := steps.get("verifiers"):
        shutil.rmtree(training.folder / "served", ignore_errors=True)
        with training.vllm() as server:
            keep("verifiers 0.4 client", [step["reward"] for step in training.verifiers(number, server)])


if __name__ == "__main__":
    # python cpu_training.py FOLDER RESULTS trl=40 verl=10
    measure(
        Path(sys.argv[1]).absolute(),
        Path(sys.argv[2]),
        {name: int(number) for name, number in (word.split("=") for word in sys.argv[3:])},
    )
