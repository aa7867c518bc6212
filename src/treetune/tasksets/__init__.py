"""Tasksets, environments and tools that come with Treetune: a module or a folder each, named by its id.

`target` turns what a user names into a taskset; `ready/` has a YAML file for each set that is ready by name.
`treetune/catalog.py` has the names of all of them.
"""
