"""The nouns: task, taskset, environment, tool, policy, score, trace.

Users subclass `task.Task`, `taskset.Taskset` and `environment.Environment`; `tool.Tool` is what a model may call,
`policy.Policy` what answers, `score.Score` what an answer earns, `trace.Trace` the record of an episode with the calls
of judges. `from_config` builds a taskset from its config, and `fingerprint` says what it is made of.

`order` is the pure function from an index to a position. `draws` reads and draws the tasks of one taskset, `mixture`
those of several, `curriculum` by pass rates, which `profile` reads. `finding` has rules,
findings and reports. Nothing here plays an episode: that is `play/`.
"""
