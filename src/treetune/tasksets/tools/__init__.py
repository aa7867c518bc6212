"""Ready tools: what tasks and configs name under `tools`."""
