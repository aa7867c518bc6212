"""A taskset offered as an MCP server: over standard input and output, or at `/mcp` of the HTTP door."""
