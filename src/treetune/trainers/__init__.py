"""Trainers: a folder per trainer, which turns Treetune's tasks into the trainer's data, rollouts and rewards.

`launch.py` plans a training (`treetune train`); its table `TRAINERS` names the function of each trainer.
`token_episode.py` plays an episode with a model that takes and returns tokens; the bridge to each trainer supplies the
sampler. `episodes.py` starts episodes of a taskset or of rows, in this process or on task servers. `single_turn.py`
scores one answer to a row, and `config.py` reads and changes a trainer's config.

The folder of each trainer exports what users and other packages use: `verl`, `skyrl`, `trl`, `areal`, `slime`, and
`verifiers`, which also serves prime-rl. A trainer's own package is imported only in its folder and, if planning works
without it, only on demand. Treetune never modifies a trainer.
"""
