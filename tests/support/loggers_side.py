"""An evaluation and a server that log to the real W&B (offline), MLflow and TensorBoard; what these then have of them,
as one JSON object. Run in the environment `LOGGERS`, in an empty folder."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

LOGS = [word for name in ("wandb", "mlflow", "tensorboard") for word in ("--log", name)]


def main() -> None:
    os.environ |= {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": "sqlite:///ml.db",
        "TREETUNE_TASK_CACHE_DIR": "cache",
    }
    treetune = [sys.executable, "-m", "treetune"]
    evaluating = [*treetune, "eval", "arithmetic", "-m", "scripted:p=0.5", "-n", "20", "-r", "2", "-o", "run", "--json"]
    done = subprocess.run([*evaluating, *LOGS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {"eval": json.loads(done.stdout), "serve": serve(treetune)}
    for name in ("run", "traces"):
        found[f"{name}: tensorboard"] = read_tensorboard(Path(name) / "tensorboard")
        found[f"{name}: mlflow"] = read_mlflow(name)
        found[f"{name}: wandb"] = read_wandb(name)
    print(json.dumps(found))


def serve(treetune: list[str]) -> list[float]:
    """Rollouts that a trainer asked for in three steps; gives their rewards."""
    from treetune.serve import EnvClient

    async def play(address: str) -> list[float]:
        async with EnvClient(address) as client:
            traces = [await client.run_rollout(await client.sample(), step=number // 4) for number in range(12)]
        return [trace.reward for trace in traces]

    serving = [*treetune, "serve", "arithmetic", "-m", "scripted:p=0.5", "--zmq", "tcp://127.0.0.1:0", "--json"]
    process = subprocess.Popen([*serving, "--traces", "traces", *LOGS], stdout=subprocess.PIPE, text=True)
    lines = []
    while not lines or lines[-1] != "}\n":
        lines.append(process.stdout.readline())
    rewards = asyncio.run(play(json.loads("".join(lines))["address"]))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    return rewards


def read_tensorboard(folder: Path) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
    return {"scalars": {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in tags["scalars"]}, "texts": texts}


def read_mlflow(name: str) -> dict:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("treetune")
    (run,) = [each for each in client.search_runs([experiment.experiment_id]) if each.info.run_name == name]
    history = {
        key: {point.step: point.value for point in client.get_metric_history(run.info.run_id, key)}
        for key in run.data.metrics
    }
    samples = None
    if any(file.path == "samples.json" for file in client.list_artifacts(run.info.run_id)):
        samples = json.loads(Path(client.download_artifacts(run.info.run_id, "samples.json")).read_text())
    return {"status": run.info.status, "params": run.data.params, "metrics": history, "samples": samples}


def read_wandb(name: str) -> dict:
    """The records of the run of that name, which W&B keeps as LevelDB keeps its log."""
    from wandb.proto.wandb_internal_pb2 import Record

    for file in Path("wandb").glob("offline-run-*/*.wandb"):
        content, records, at, partial = file.read_bytes(), [], 7, b""
        while at + 7 <= len(content):
            if 32768 - at % 32768 < 7:  # no room for a header at the end of a block
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack_from("<IHB", content, at)
            partial += content[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or its last part
                records.append(Record.FromString(partial))
                partial = b""
        run = next(record.run for record in records if record.HasField("run"))
        if run.display_name != name:
            continue
        summary, history = {}, []
        for record in records:
            for item in record.summary.update:
                summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if record.HasField("history"):
                history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
        tables = [json.loads(path.read_text()) for path in file.parent.rglob("*.table.json")]
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        return {"project": run.project, "config": config, "summary": summary, "history": history, "tables": tables}
    raise LookupError(name)


if __name__ == "__main__":
    main()
