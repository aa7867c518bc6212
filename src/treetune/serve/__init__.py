"""Serving a taskset to trainers: the pull server, its pool of workers, and its client."""
