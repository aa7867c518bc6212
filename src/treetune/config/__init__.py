"""Configs and names: from YAML and strings to typed structs and classes.

`structs` turns YAML into typed structs, `overrides` lays dotted keys over it, `variables` resolves interpolations and
`aliases` knows what other tools call our keys. A name of code is parsed once (`code_reference`), checked (`trust`) and
loaded in one place (`plugins`, with `code_files` for files). `builtin` has what comes with the package, sets that are
ready by name included; `run_config` reads the config of a run folder as untrusted data.
"""
