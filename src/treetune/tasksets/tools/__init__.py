"""Ready-made tools: what tasks and configs name under `tools`."""
