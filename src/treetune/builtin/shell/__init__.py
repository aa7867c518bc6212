"""Tasks on a machine: OS interaction, and tasks written for AgentBench's worker."""
