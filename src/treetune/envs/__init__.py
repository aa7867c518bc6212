"""Built-in environments, one file each."""

BUILTIN = {
    "aime": "treetune.envs.aime:AimeEnvironment",
    "alphabet-sort": "treetune.envs.alphabet_sort:AlphabetSortEnvironment",
    "gsm8k": "treetune.envs.gsm8k:Gsm8kEnvironment",
    "gsm8k_multi_turn": "treetune.envs.gsm8k_multi_turn:Gsm8kMultiTurnEnvironment",
    "harbor": "treetune.envs.harbor:HarborEnvironment",
    "lcb": "treetune.envs.lcb:LcbEnvironment",
    "os-interaction": "treetune.envs.os_interaction:OSInteractionEnvironment",
    "scored": "treetune.envs.scored:ScoredEnvironment",
    "search": "treetune.envs.search:SearchEnvironment",
    "searchcode": "treetune.envs.searchcode:SearchCodeEnvironment",
    "text2sql": "treetune.envs.text2sql:Text2SqlEnvironment",
    "textarena": "treetune.envs.textarena:TextArenaEnvironment",
    "wikispeedia": "treetune.envs.wikispeedia:WikispeediaEnvironment",
}
