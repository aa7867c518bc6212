"""The nouns: task, taskset, environment, tool, policy, score, trace.

Users subclass `task.Task`, `taskset.Taskset` and `environment.Environment`. A `tool.Tool` is a function that a model
may call, a `policy.Policy` answers prompts, a `score.Score` is the result of scoring an answer, and a `trace.Trace`
records an episode, including calls to judges. `from_config` builds a taskset from its config; `fingerprint` identifies
the code, config and data behind it.

`order` is the pure function from an index to a position. `draws` reads and draws the tasks of one taskset, `mixture`
those of several, and `curriculum` draws them by the pass rates that `profile` reads; `interleave` has the arithmetic of
weighted draws. `taskset_config` has the keys of every taskset. `finding` defines rules, findings and reports. Episodes
are played in `play/`, not here.
"""
