"""The ZMQ door (`door.py`), its requests and sockets, and the pull clients (`client.py`, `blocking.py`)."""
