"""Servers of other projects as tasksets: `openenv:URL` (`openenv.py`), `ors:URL` (`ors.py`), and the code they
share."""
