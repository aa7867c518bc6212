"""Tasks written for AgentBench's worker (`agentrl-worker`), as tasksets: `treetune serve agentbench:module:Class`."""

from treetune.agentbench.adapter import EpisodeState, TaskServerAdapter

__all__ = ["EpisodeState", "TaskServerAdapter"]
