"""What hot paths cost, each beside what a user would use instead: `python -m benchmarks`."""
