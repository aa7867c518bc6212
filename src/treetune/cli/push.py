"""`treetune push`: tasks, built into a trainer's rows, or a run, as a dataset of the hub."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from treetune.cli import options
from treetune.cli.build import build_target
from treetune.cli.options import TARGET, Json, option
from treetune.cli.output import print_json
from treetune.data.rows.push import push_rows
from treetune.errors import plural
from treetune.runs.discovery import find_run, open_run
from treetune.system.hub import check_repo
from treetune.system.screen import Screen
from treetune.tasksets.target import refuse_server


def push_command(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET|RUN", help=f"{TARGET} Or a run folder.")],
    repo: Annotated[str, option("The dataset: user/name; made where there is none.", "--repo")],
    private: Annotated[bool, option("Make it a private one.", "--private")] = False,
    format: options.Format = "verl",
    num_tasks: options.NumTasks = None,
    cache_dir: options.CacheDir = None,
    trust: options.Trust = False,
    json: Json = False,
) -> None:
    """Push tasks or a run to the hub, as a dataset that `load_dataset` reads, with a card.

    Tasks are built first, as `treetune build` does; keys are overridden with dots: --taskset.level 2. Of a run there is
    a row for each rollout, and its own files. The token is HF_TOKEN, or that of `hf auth login`.
    """
    refuse_server(target, "push")
    check_repo(repo)
    screen = Screen(json)
    if find_run(target) is not None:
        run = open_run(target)
        url = run.push_to_hub(repo, private=private)
        rows, kind = len(run), "run"
    else:
        entries = build_target(context, target, format, screen, num_tasks=num_tasks, cache_dir=cache_dir, trust=trust)
        splits = {
            split: [Path(entry["path"]) for entry in entries if entry["split"] == split]
            for split in dict.fromkeys(entry["split"] for entry in entries)
        }
        words = ["treetune", "build", target, "--format", format, *(["-n", str(num_tasks)] if num_tasks else [])]
        words += [word for key, value in context.obj.items() for word in (f"--{key}", value)]
        title = ", ".join(dict.fromkeys(entry["name"] for entry in entries))
        url = push_rows(splits, repo, title=title, command=shlex.join(words), format=format, private=private)
        rows, kind = sum(entry["rows"] for entry in entries), "tasks"
    if json:
        return print_json({"repo": repo, "url": url, "kind": kind, "rows": rows, "private": private})
    return screen.say(f"{plural(rows, 'row')}: {url}")
