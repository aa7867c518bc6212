"""The OpenEnv door: `/ws` and the routes beside it (`door.py`), sessions, JSON-RPC, and ORS on the same port."""
