"""Sources: opens what a user names as batches of rows.

`names` finds files, folders and hub datasets. `loading_params` holds the arguments of `load_dataset`, and `loading`
opens the data that they name: as `LocalFiles` if Treetune reads the files itself, else as a `LibraryDataset`; it also
finds values that the `datasets` library changed. `files` opens parquet, JSON and CSV for all of these and for trainers'
rows. `splits` decides which files and rows belong to a split.
"""
