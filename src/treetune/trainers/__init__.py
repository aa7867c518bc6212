"""Bridges to trainers, one file each."""

from treetune.matrix import Column, Kind

COLUMNS = (
    Column(name="verl", of=Kind, refuses={Kind.MULTI_TURN: "has episodes of several turns, and verl plays one"}),
    Column(name="SkyRL", of=Kind),
    Column(name="AReaL", of=Kind),
    Column(name="TRL", of=Kind),
)
