"""Questions answered with a search."""
