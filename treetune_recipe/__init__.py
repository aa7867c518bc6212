"""Recipes: a task, its config and its entry point."""
