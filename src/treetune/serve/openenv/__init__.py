"""A taskset offered as an OpenEnv environment: `/ws`, the routes beside it, and ORS on the same port."""
