"""Built-in environments, one file each."""

BUILTIN = {
    "alphabet-sort": "treetune.envs.alphabet_sort:AlphabetSortEnvironment",
}
