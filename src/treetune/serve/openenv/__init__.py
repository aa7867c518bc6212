"""OpenEnv and ORS, in both directions.

`door.py` serves `/ws` and the other routes, with `ors.py` on the same port; `session.py` has the sessions and their
JSON-RPC, `wire.py` the bodies. `taskset.py` and `ors_taskset.py` play the tasks of other projects' servers.
"""
