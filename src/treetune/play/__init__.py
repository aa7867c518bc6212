"""Playing tasks. `episode` is the only code that touches an environment.

`rollout` plays an episode with a policy, `toolbox` runs its tool calls, `group` collects the rollouts of a task.
`streams` hands out tasks (`reader`, `leases`, `retries`), `host` owns a taskset and runs its rollouts and episodes,
`episode_table` and `episode_record` keep the episodes that others step, `weights` the version of a model's weights.
"""
