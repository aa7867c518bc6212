"""From article to article by links."""
