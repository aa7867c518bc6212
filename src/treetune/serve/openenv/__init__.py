"""The OpenEnv door: `/ws` and the other routes (`door.py`), sessions and JSON-RPC, and ORS on the same port."""
