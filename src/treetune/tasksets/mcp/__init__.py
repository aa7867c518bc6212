"""Tools of MCP servers, over the official SDK: a program that is run for each episode, or an address."""
