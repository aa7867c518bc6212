"""Small tasks with words."""
