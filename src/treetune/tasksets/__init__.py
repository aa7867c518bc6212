"""The tasksets, environments, tools and scorers that come with Treetune: one module or folder each, named by its id.

`treetune/catalog.py` lists them by name, and nothing is imported before it is used. `ready/` has a YAML file for each
ready-made set.

Other packages use `target` (`load_taskset` turns what a user names into a taskset) and `turns.TurnEnvironment`, which
the built-in environments share. The folders: `code` runs programs of a policy, `shell` and `harbor` give it a machine,
`mcp` the tools of a server, `textarena` a game, and `tools` holds the ready-made tools.
"""
