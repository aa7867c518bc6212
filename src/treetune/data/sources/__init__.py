"""Sources: what a user names, opened as batches of rows.

`names` finds files, folders and datasets of the hub. `loading_params` has the arguments of `load_dataset`, and
`loading` opens what they name: as `LocalFiles` where Treetune reads the files itself, else as a `LibraryDataset`.
`files` opens parquet, JSON and CSV for all of these and for trainers' rows. `splits` knows which files and rows belong
to a split, and `library_changes` what the `datasets` library made of values.
"""
