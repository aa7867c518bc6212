"""The pull door: tasks and rollouts over ZMQ."""
