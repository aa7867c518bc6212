"""The HTTP door: episodes for all that speak HTTP."""
