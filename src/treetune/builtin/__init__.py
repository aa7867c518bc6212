"""Built-in tasksets, environments and tools: a module or a folder each, named by its id.

`treetune/catalog.py` has their names.
"""
