"""Trainers' row formats."""
