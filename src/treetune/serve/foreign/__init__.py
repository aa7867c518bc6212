"""Servers of other projects as tasksets: `openenv:URL` (`openenv.py`) and `ors:URL` (`ors.py`)."""
