"""Bridges to trainers, one file each."""
