"""Trainers: a folder per trainer, in which Treetune's tasks become the trainer's data, rollouts and rewards.

`launch.py` plans a training (`treetune train`); `TRAINERS` in it names the function of each trainer. `token_episode.py`
plays an episode with a model that takes and gives tokens: a bridge gives it a sampler. `episodes.py` starts episodes,
of a taskset or of rows, here or on task servers, and `single_turn.py` scores one answer to a row. `config.py` reads
and changes a trainer's config.

What users and other rooms use of a trainer is what its folder names: `verl`, `skyrl`, `trl`, `areal`, `slime`, and
`verifiers`, which serves prime-rl too. A trainer's own package is imported only in that trainer's folder, and where it
can be planned without, only when it is needed. No trainer is ever changed.
"""
