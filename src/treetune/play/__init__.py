"""Plays tasks. `episode` is the only module that touches an environment.

`rollout` plays an episode with a policy and makes its trace, `toolbox` runs the tool calls, `group` collects the
rollouts of a task. `streams` hands out each task once: `reader` reads generators, `leases` tracks draws that are not
finished. `protocol` is the interface of every host, including the options of a rollout; `host` is the host in this
process. `episode_table` and `episode_record` hold the episodes that clients step; `weights` tracks the version of a
model's weights.

Public: `Episode`, `Limits` and `play_answer` of `episode`, `run_rollout`, `LocalHost`, `Host` and the options of
`protocol`, `sample_groups`, `Streams`, `Weights`.
"""
