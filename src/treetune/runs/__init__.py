"""Runs on disk: the folders of traces that `eval` and `serve --traces` write, and the runs of other programs.

    run = open_run("runs/x")                 # `discovery.py` opens runs, including those of verl, TRL or Inspect
    run.mean_reward, run.groups().df(), list(run.traces("failed"))

`run.py` has `Run`, which holds a run as data: its rollouts as arrays (`columns.py`), selected by queries (`query.py`),
with the marks and tags that people add (`annotations.py`). `folder.py` writes run folders, `rolling.py` those of
servers, `index.py` and `entry.py` their index, and `summary.py` their figures. `token_check.py` verifies the tokens of
a run. `export.py` exports the rollouts that a query selects, `eval_log.py` writes a run as an Inspect log with its
samples (`eval_sample.py`), `push.py` pushes it to the hub. Anyone may have written a run, so every file of a run is
opened by `plain_files.py`. `foreign/` reads runs of other programs.
"""
