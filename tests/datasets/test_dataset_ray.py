"""The same build on a Ray cluster gives the same rows."""

from __future__ import annotations

import json

import pytest
import venvs

pytestmark = pytest.mark.slow

BUILD = """
import json, sys
from pathlib import Path
import pyarrow.parquet as pq
from ray.cluster_utils import Cluster
import ray
from treetune.datasets.build import build
from treetune.datasets.declared import load_task

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)
task = load_task(json.loads(sys.argv[1]))
out = Path(sys.argv[2])
here = build(task, out / "here.parquet", "verl")
there = build(task, out / "there.parquet", "verl", engine="ray")
rows = [pq.read_table(out / name).to_pylist() for name in ("here.parquet", "there.parquet")]
print(json.dumps({"same": rows[0] == rows[1], "rows": len(rows[1]), "dropped": [here.dropped, there.dropped],
                  "nodes": len({node["NodeID"] for node in ray.nodes() if node["Alive"]})}))
ray.shutdown()
cluster.shutdown()
"""


def test_ray_builds_the_same_rows_in_the_same_order(tmp_path):
    python = venvs.venv("ray", ["ray[default]==2.60.0"])
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"q": f"{n}?", "a": str(n) if n % 7 else ""}) + "\n" for n in range(45_000))
    )
    (tmp_path / "mine.py").write_text(
        "from treetune_verl.tasks import Task as Base\nclass Task(Base):\n"
        "    def _make_map_fn(self):\n        make = super()._make_map_fn()\n"
        "        return lambda row, index: {**make(row, index), 'ability': 'math'}\n"
    )
    node = {
        "custom_cls": {"path": str(tmp_path / "mine.py")},
        "loading_params": {"args": ["json"], "kwargs": {"data_files": str(tmp_path / "rows.jsonl"), "split": "train"}},
        "prompt_template": "{q}",
        "ground_truth": "a",
    }
    printed = venvs.run(python, "-c", BUILD, json.dumps(node), tmp_path, timeout=300, HF_HOME=str(tmp_path / "hf"))
    result = json.loads(printed.splitlines()[-1])
    assert result["same"]
    assert result["nodes"] == 2
    assert result["dropped"] == [{"no ground truth": 6429}] * 2
    assert result["rows"] == 45_000 - 6429
