"""Coding problems, run on test cases in a sandbox."""
