"""Questions to a database."""
