"""A server whose rollouts run in many workers."""
