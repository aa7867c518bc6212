"""The examples of docs/trainers/ run as they stand there. That of AReaL is run by tests/support/areal_side.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import task_servers
import venvs


def example(page, name):
    text = (venvs.ROOT / "docs/trainers" / page).read_text()
    (found,) = re.findall(rf"```python\n# file: {re.escape(name)}\n(.*?)```", text, re.S)
    return found


def test_tasks_and_rollouts_are_pulled(tmp_path):
    address = f"tcp://127.0.0.1:{task_servers.free_port()}"
    (tmp_path / "pull.py").write_text(example("own-loop.md", "pull.py").replace("tcp://127.0.0.1:5555", address))
    command = ["-m", "treetune", "serve", "arithmetic", "--zmq", address, "-m", "scripted:gold"]
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        try:
            done = subprocess.run([sys.executable, "pull.py"], cwd=tmp_path, capture_output=True, text=True)
        finally:
            server.terminate()
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["1.0", "[1.0]"]] * 8


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """A folder with a model for the examples, and the Python that has TRL."""
    python, folder = venvs.venv(*venvs.TRL), tmp_path_factory.mktemp("small")
    make = (
        "from real_letters import letters_tokenizer; from transformers import LlamaConfig, LlamaForCausalLM;"
        "tokenizer = letters_tokenizer(); tokenizer.save_pretrained('model');"
        "LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16,"
        " num_hidden_layers=1, num_attention_heads=2, pad_token_id=tokenizer.pad_token_id,"
        " eos_token_id=tokenizer.eos_token_id, bos_token_id=None)).save_pretrained('model')"
    )
    venvs.run(python, "-c", make, cwd=folder, PYTHONPATH=str(venvs.ROOT / "tests" / "support"))
    return python, folder


def train(name, small_model):
    """The example on a machine without a GPU, and without the time for a hundred steps."""
    python, folder = small_model
    script = example("trl.md", name).replace("Qwen/Qwen3-0.6B", "model")
    (folder / name).write_text(script.replace("=100", "=2, use_cpu=True, bf16=False, report_to=[]"))
    return venvs.run(python, name, cwd=folder)


@pytest.mark.slow
def test_trl_trains_on_a_taskset_in_its_own_process(small_model):
    assert "'task_server_failure': '0'" in train("train_trl.py", small_model)


@pytest.mark.slow
def test_trl_trains_on_rows_that_were_built(small_model, treetune, tmp_path):
    built = treetune(
        "build", "arithmetic", "-n", 16, "--format", "trl", "--json", TREETUNE_TASK_CACHE_DIR=str(tmp_path)
    )
    (rows,) = built.json["train_files"]
    (small_model[1] / "rows.parquet").write_bytes(Path(rows).read_bytes())
    assert "'rewards/score_rows/mean'" in train("train_rows.py", small_model)
