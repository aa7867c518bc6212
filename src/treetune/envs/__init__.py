"""Built-in environments, one file each."""

BUILTIN = {
    "aime": "treetune.envs.aime:AimeEnvironment",
    "alphabet-sort": "treetune.envs.alphabet_sort:AlphabetSortEnvironment",
    "gsm8k": "treetune.envs.gsm8k:Gsm8kEnvironment",
    "gsm8k_multi_turn": "treetune.envs.gsm8k_multi_turn:Gsm8kMultiTurnEnvironment",
    "search": "treetune.envs.search:SearchEnvironment",
    "text2sql": "treetune.envs.text2sql:Text2SqlEnvironment",
    "wikispeedia": "treetune.envs.wikispeedia:WikispeediaEnvironment",
}
