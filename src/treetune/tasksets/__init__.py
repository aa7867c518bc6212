"""Built-in tasksets, one file each."""

BUILTIN = {
    "alphabet-sort": "treetune.tasksets.alphabet_sort:AlphabetSort",
    "arithmetic": "treetune.tasksets.arithmetic:Arithmetic",
    "dataset": "treetune.datasets.taskset:DatasetTaskset",
    "harbor": "treetune.tasksets.harbor:Harbor",
    "mixture": "treetune.mixture:Mixture",
    "os-interaction": "treetune.tasksets.os_interaction:OSInteraction",
    "reasoning-gym": "treetune.tasksets.reasoning_gym:ReasoningGym",
    "reverse-text": "treetune.tasksets.reverse_text:ReverseText",
    "rows": "treetune.formats.taskset:RowsTaskset",
    "textarena": "treetune.tasksets.textarena:TextArena",
    "union": "treetune.mixture:Union",
    "wikispeedia": "treetune.tasksets.wikispeedia:Wikispeedia",
}
