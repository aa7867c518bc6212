"""Configs and names: converts YAML and strings to typed structs and classes.

`structs` converts YAML to typed structs, `overrides` applies dotted keys, `variables` resolves interpolations, and
`aliases` knows what other tools call our keys. A code name is parsed once (`code_reference`), checked (`trust`) and
loaded in one place (`plugins`, with `code_files` for files). `builtin` has the built-in components and the ready-made
task sets; `run_config` reads the config of a run folder as untrusted data.
"""
