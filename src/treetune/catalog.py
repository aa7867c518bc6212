"""What comes with the package, by name. Nothing is imported before it is used.

This is the only module that knows every room. `treetune/__init__.py` hands the tables to `config/builtin.py`, where the
rooms below look names up.
"""

from pathlib import Path

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
    "calculator": "treetune.tasksets.tools.calculator:calculator",
    "mcp": "treetune.tasksets.mcp.tools:McpTools",
    "python": "treetune.tasksets.tools.sandboxed:PythonTool",
    "search": "treetune.tasksets.tools.search:SearchTool",
    "shell": "treetune.tasksets.tools.sandboxed:ShellTool",
}
"""Ready tools: functions marked with `@tool`, and classes of `ToolSource`."""

FOREIGN_TASKSETS = {
    "agentbench": "treetune.tasksets.shell.agentbench:taskset_class",
    "verifiers": "treetune.trainers.verifiers.imported:taskset_class",
    "openenv": "treetune.serve.foreign.openenv:taskset_class",
    "ors": "treetune.serve.foreign.ors:taskset_class",
}
FOREIGN_ENVIRONMENTS = {"skyrl": "treetune.trainers.skyrl.gym:environment_class"}
"""Prefixes of names that belong to another library, each with the function that gives its classes."""

ADAPTED_ENVIRONMENTS = {"skyrl_gym": "treetune.trainers.skyrl.gym:adapt_class"}
"""Libraries whose own environments play as ours, each with the function that makes one of ours of such a class."""

NAMES_ROWS = "treetune.data.sources.names:names_rows"
"""Says whether a target names trainers' rows."""
DECLARED_NODE = "treetune.data.datasets.task_lists:read_list_node"
"""Gives the taskset of a config that declares `train_tasks` and `val_tasks`."""
SERVER_NODE = "treetune.serve.remote_taskset:read_server_node"
"""Gives the taskset that stands for the server at an address."""
BY_PARAMETER = "treetune.core.mixture:ByParameter"
"""The taskset of a profile that has a pass rate for each value of a parameter."""

SCORERS = {
    "all_of": "treetune.scorers.combined:AllOf",
    "choice": "treetune.scorers.texts:Choice",
    "code": "treetune.tasksets.code.scorers:Code",
    "exact": "treetune.scorers.texts:Exact",
    "f1": "treetune.scorers.texts:F1",
    "ifeval": "treetune.tasksets.ifeval:IfEval",
    "includes": "treetune.scorers.texts:Includes",
    "json": "treetune.scorers.structures:Json",
    "judge": "treetune.scorers.judges:Judge",
    "math": "treetune.tasksets.math_scorer:Math",
    "number": "treetune.scorers.numbers:Number",
    "pattern": "treetune.scorers.patterns:Pattern",
    "rule": "treetune.scorers.scorer:Rule",
    "tests": "treetune.tasksets.code.scorers:Tests",
    "weighted": "treetune.scorers.combined:Weighted",
}
"""The kinds of scorers. No module of that room may have the name of a kind: that is the name of the kind in Python."""

READY = Path(__file__).parent / "tasksets" / "ready"
"""The folder of the sets that are ready by name."""
