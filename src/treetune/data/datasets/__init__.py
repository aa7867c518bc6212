"""Dataset tasks: tasksets that a config declares over a dataset or files, and the parquet files built from them.

- `taskset.DatasetTaskset` is the class that users subclass; `config.DatasetConfig` is its config.
- `task_lists` reads the task lists of a config and reports every fault in them.
- `build` writes rows. `row_builder` makes rows, from templates column by column or with `map_function` row by row;
  `selection` drops rows and collects the notes of a build.
- `list_files` makes the files that a trainer gets for a list: joined, or drawn by weight.
"""
