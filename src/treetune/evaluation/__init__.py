"""Evaluation: the runner, results on disk, reports."""
