"""Games of textarena."""
