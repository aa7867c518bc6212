"""The OpenEnv door: `/ws` and the other routes (`door.py`), sessions, JSON-RPC, and ORS on the same port."""
