"""What comes with the package, by name. Nothing is imported before it is used.

This is the only module that knows every room. `treetune/__init__.py` hands the tables to `builtin_tables.py`, where the
rooms below look names up.
"""

from pathlib import Path

TASKSETS = {
    "alphabet-sort": "treetune.builtin.alphabet_sort:AlphabetSort",
    "arithmetic": "treetune.builtin.arithmetic:Arithmetic",
    "dataset": "treetune.datasets.taskset:DatasetTaskset",
    "harbor": "treetune.builtin.harbor.taskset:Harbor",
    "mixture": "treetune.mixture:Mixture",
    "os-interaction": "treetune.builtin.shell.taskset:OSInteraction",
    "reasoning-gym": "treetune.builtin.reasoning_gym:ReasoningGym",
    "reverse-text": "treetune.builtin.reverse_text:ReverseText",
    "rows": "treetune.rows.taskset:RowsTaskset",
    "textarena": "treetune.builtin.textarena.taskset:TextArena",
    "union": "treetune.mixture:Union",
    "wikispeedia": "treetune.builtin.wikispeedia:Wikispeedia",
}

ENVIRONMENTS = {
    "aime": "treetune.builtin.aime:AimeEnvironment",
    "alphabet-sort": "treetune.builtin.alphabet_sort:AlphabetSortEnvironment",
    "gsm8k": "treetune.builtin.gsm8k:Gsm8kEnvironment",
    "gsm8k_multi_turn": "treetune.builtin.gsm8k:Gsm8kMultiTurnEnvironment",
    "harbor": "treetune.builtin.harbor.environment:HarborEnvironment",
    "lcb": "treetune.builtin.code.lcb:LcbEnvironment",
    "os-interaction": "treetune.builtin.shell.environment:OSInteractionEnvironment",
    "scored": "treetune.rows.scorer:ScoredEnvironment",
    "search": "treetune.builtin.search:SearchEnvironment",
    "searchcode": "treetune.builtin.search:SearchCodeEnvironment",
    "text2sql": "treetune.builtin.text2sql:Text2SqlEnvironment",
    "textarena": "treetune.builtin.textarena.taskset:TextArenaEnvironment",
    "wikispeedia": "treetune.builtin.wikispeedia:WikispeediaEnvironment",
}

TOOLS = {
    "calculator": "treetune.builtin.tools.calculator:calculator",
    "mcp": "treetune.builtin.mcp.tools:McpTools",
    "python": "treetune.builtin.tools.sandboxed:PythonTool",
    "search": "treetune.builtin.tools.search:SearchTool",
    "shell": "treetune.builtin.tools.sandboxed:ShellTool",
}
"""Ready tools: functions marked with `@tool`, and classes of `ToolSource`."""

FOREIGN_TASKSETS = {
    "agentbench": "treetune.builtin.shell.agentbench:taskset_class",
    "verifiers": "treetune.trainers.verifiers.imported:taskset_class",
    "openenv": "treetune.serve.openenv.taskset:taskset_class",
    "ors": "treetune.serve.ors.taskset:taskset_class",
}
FOREIGN_ENVIRONMENTS = {"skyrl": "treetune.trainers.skyrl.gym:environment_class"}
"""Prefixes of names that belong to another library, each with the function that gives its classes."""

ADAPTED_ENVIRONMENTS = {"skyrl_gym": "treetune.trainers.skyrl.gym:adapt_class"}
"""Libraries whose own environments play as ours, each with the function that makes one of ours of such a class."""

NAMES_ROWS = "treetune.rows.sources:names_rows"
"""Says whether a target names trainers' rows."""
DECLARED_NODE = "treetune.datasets.declared:read_list_node"
"""Gives the taskset of a config that declares `train_tasks` and `val_tasks`."""
SERVER_NODE = "treetune.serve.served:read_server_node"
"""Gives the taskset that stands for the server at an address."""
BY_PARAMETER = "treetune.mixture:ByParameter"
"""The taskset of a profile that has a pass rate for each value of a parameter."""

SCORERS = {
    "all_of": "treetune.scorers.combined:AllOf",
    "choice": "treetune.scorers.choices:Choice",
    "code": "treetune.builtin.code.scorer:Code",
    "exact": "treetune.scorers.texts:Exact",
    "f1": "treetune.scorers.texts:F1",
    "ifeval": "treetune.builtin.ifeval.scorer:IfEval",
    "includes": "treetune.scorers.texts:Includes",
    "json": "treetune.scorers.structures:Json",
    "judge": "treetune.judges:Judge",
    "math": "treetune.builtin.math_scorer:Math",
    "number": "treetune.scorers.numbers:Number",
    "pattern": "treetune.scorers.patterns:Pattern",
    "rule": "treetune.scorers.by_rule:Rule",
    "tests": "treetune.builtin.code.tests_scorer:Tests",
    "weighted": "treetune.scorers.combined:Weighted",
}
"""The kinds of scorers. No module of that room may have the name of a kind: that is the name of the kind in Python."""

READY = Path(__file__).parent / "ready"
"""The folder of the sets that are ready by name."""
