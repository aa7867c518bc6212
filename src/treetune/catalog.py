"""The built-in components, by name. Nothing is imported before it is used.

This is the only module that knows all packages. `treetune/__init__.py` passes the tables to `config/__init__.py`,
where lower packages look names up.
"""

import os.path

TASKSETS = {
    "alphabet-sort": "treetune.tasksets.alphabet_sort:AlphabetSort",
    "arithmetic": "treetune.tasksets.arithmetic:Arithmetic",
    "dataset": "treetune.data.datasets.taskset:DatasetTaskset",
    "harbor": "treetune.tasksets.harbor.taskset:Harbor",
    "mixture": "treetune.core.mixture:Mixture",
    "os-interaction": "treetune.tasksets.shell.taskset:OSInteraction",
    "reasoning-gym": "treetune.tasksets.reasoning_gym:ReasoningGym",
    "reverse-text": "treetune.tasksets.reverse_text:ReverseText",
    "rows": "treetune.data.rows.taskset:RowsTaskset",
    "textarena": "treetune.tasksets.textarena.taskset:TextArena",
    "union": "treetune.core.mixture:Union",
    "wikispeedia": "treetune.tasksets.wikispeedia:Wikispeedia",
}

ENVIRONMENTS = {
    "aime": "treetune.tasksets.aime:AimeEnvironment",
    "alphabet-sort": "treetune.tasksets.alphabet_sort:AlphabetSortEnvironment",
    "gsm8k": "treetune.tasksets.gsm8k:Gsm8kEnvironment",
    "gsm8k_multi_turn": "treetune.tasksets.gsm8k:Gsm8kMultiTurnEnvironment",
    "harbor": "treetune.tasksets.harbor.environment:HarborEnvironment",
    "lcb": "treetune.tasksets.code.lcb:LcbEnvironment",
    "os-interaction": "treetune.tasksets.shell.environment:OSInteractionEnvironment",
    "scored": "treetune.data.rows.scorer:ScoredEnvironment",
    "search": "treetune.tasksets.search:SearchEnvironment",
    "searchcode": "treetune.tasksets.search:SearchCodeEnvironment",
    "text2sql": "treetune.tasksets.text2sql:Text2SqlEnvironment",
    "textarena": "treetune.tasksets.textarena.taskset:TextArenaEnvironment",
    "wikispeedia": "treetune.tasksets.wikispeedia:WikispeediaEnvironment",
}

TOOLS = {
    "calculator": "treetune.tasksets.tools:calculator",
    "mcp": "treetune.tasksets.mcp.tools:McpTools",
    "python": "treetune.tasksets.tools:PythonTool",
    "search": "treetune.tasksets.tools:SearchTool",
    "shell": "treetune.tasksets.tools:ShellTool",
}
"""Built-in tools: functions marked with `@tool`, and subclasses of `ToolSource`."""

FOREIGN_TASKSETS = {
    "agentbench": "treetune.tasksets.shell.agentbench:taskset_class",
    "verifiers": "treetune.trainers.verifiers.imported:taskset_class",
    "openenv": "treetune.serve.openenv.taskset:taskset_class",
    "ors": "treetune.serve.openenv.ors_taskset:taskset_class",
}
FOREIGN_ENVIRONMENTS = {"skyrl": "treetune.trainers.skyrl.gym:environment_class"}
"""Name prefixes of other libraries, each with the function that returns their classes."""

ADAPTED_ENVIRONMENTS = {"skyrl_gym": "treetune.trainers.skyrl.gym:adapt_class"}
"""Libraries whose environments can be adapted, each with the function that adapts a class."""

NAMES_ROWS = "treetune.data.sources.names:names_rows"
"""A function that says whether a target names trainers' rows."""
DECLARED_NODE = "treetune.data.datasets.task_lists:read_list_node"
"""Reads the taskset node of a config that declares `train_tasks` and `val_tasks`."""
SERVER_NODE = "treetune.serve.remote_taskset:read_server_node"
"""Reads the taskset node of a server's address."""
BY_PARAMETER = "treetune.core.mixture:ByParameter"
"""The taskset for a profile with a pass rate for each value of a parameter."""

SCORERS = {
    "all_of": "treetune.scorers.combined:AllOf",
    "choice": "treetune.scorers.multiple_choice:Choice",
    "code": "treetune.tasksets.code.scorers:Code",
    "exact": "treetune.scorers.texts:Exact",
    "f1": "treetune.scorers.texts:F1",
    "ifeval": "treetune.tasksets.ifeval:IfEval",
    "includes": "treetune.scorers.texts:Includes",
    "json": "treetune.scorers.structures:Json",
    "judge": "treetune.scorers.judges:Judge",
    "math": "treetune.tasksets.math_scorer:Math",
    "number": "treetune.scorers.numbers:Number",
    "pattern": "treetune.scorers.texts:Pattern",
    "rule": "treetune.scorers.scorer:Rule",
    "tests": "treetune.tasksets.code.scorers:Tests",
    "weighted": "treetune.scorers.combined:Weighted",
}
"""The kinds of scorers. No module of `scorers` may have the name of a kind, because in Python that name refers to the
kind."""

READY = os.path.join(os.path.dirname(__file__), "tasksets", "ready")
"""The folder of the ready-made task sets."""
