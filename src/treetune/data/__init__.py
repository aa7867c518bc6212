"""Data: trainers' rows, and the datasets that tasks are built from.

- `sources`: opens files, folders and Hugging Face datasets as batches of rows.
- `rows`: trainers' rows in all formats. `read_tasks`, `read_rows` and `read_tables` read them, `RowsTaskset` holds
  their tasks, and `cache.Cache` stores built files.
- `datasets`: tasksets that a config declares over a dataset.
- `validate`: the rules for rows, and `write_tasks`, which writes only rows that follow them.
- `arrow_values`: converts Arrow values to Python and back, for all of the above.
"""
