"""Runs on disk: folders of traces with their config, which `eval` and `serve --traces` write.

from treetune.runs.folder import TRACES, RunFolder
"""
