"""Data: the rows of trainers, and the datasets that tasks are made of.

- `sources`: files, folders and datasets of the hub, opened as batches of rows.
- `rows`: trainers' rows in their formats. `read_tasks`, `read_rows` and `read_tables` read them, `RowsTaskset` has
  their tasks, `cache.Cache` keeps built files.
- `datasets`: tasksets that a config declares over a dataset.
- `validate`: the rules that rows must keep, and `write_tasks`, which writes only rows that keep them.
- `arrow_values`: Arrow's values as Python's and back, for all of these.
"""
