"""Dataset tasks: tasksets that a config declares over a dataset or files, and the parquet that is built of them.

- `taskset.DatasetTaskset` is one, with its `config.DatasetConfig`; users subclass it.
- `task_lists` reads the lists of tasks of a config and finds every fault in them.
- `build` writes rows: `row_builder` makes them, from templates in columns or with `map_function` one by one;
  `selection` drops some and keeps the notes of a build.
- `list_files` gives a trainer the files of a list: joined, or drawn by weight.
"""
