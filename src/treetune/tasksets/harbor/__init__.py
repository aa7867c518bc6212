"""Harbor tasks."""
