"""Stands in for slime, which is on no package index: its classes and functions as far as Treetune and its tests use
them, written for these tests. `test_slime.py` checks them against calls that were recorded with the real one."""
