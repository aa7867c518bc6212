"""Playing tasks. `episode` is the only code that touches an environment.

`rollout` plays an episode with a policy and makes its trace, `toolbox` runs the tool calls, `group` collects the
rollouts of a task. `streams` hands out tasks, each once: `reader` reads generators, `leases` keeps the draws that are
not done. `protocol` is what every host offers, with the options of a rollout; `host` is the one in this process.
`episode_table` and `episode_record` keep the episodes that clients step, `weights` the version of a model's weights.

For others: `Episode`, `Limits` and `play_answer` of `episode`, `run_rollout`, `LocalHost`, `Host` and the options of
`protocol`, `sample_groups`, `Streams`, `Weights`.
"""
