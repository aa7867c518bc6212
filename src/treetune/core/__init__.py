"""The nouns: task, taskset, environment, tool, policy, score, trace.

`task`, `taskset` and `environment` are what users subclass; `from_config` builds a taskset from its config and
`fingerprint` says what it is made of. `order` is the pure function from an index to a position, `mixture` draws from
several tasksets, `curriculum/` draws by pass rates. `finding` has rules, findings and reports.
Nothing here plays an episode: that is `play/`.
"""
