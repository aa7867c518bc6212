"""The tasksets, environments, tools and scorers that come with Treetune: a module or a folder each, named by its id.

`treetune/catalog.py` lists them by name, and nothing is imported before it is used. `ready/` has a YAML file for each
set that is ready by name.

Other rooms use `target` (`load_taskset`: from what a user names to a taskset) and `turns.TurnEnvironment`, which the
built-in environments share. Of the folders, `code` runs programs of a policy, `shell` and `harbor` give it a machine,
`mcp` the tools of a server, `textarena` a game, and `tools` has the ready tools.
"""
