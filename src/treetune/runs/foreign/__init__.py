"""Opens runs that other programs wrote as runs of Treetune. `runs/discovery.py` finds and opens them.

    from treetune.runs.discovery import open_run
    open_run("outputs/rollout_data").groups()

The module of each program recognises that program's files and converts each rollout in them to a trace: see
`program.py`.
"""

from treetune.runs.foreign.atif import Atif
from treetune.runs.foreign.inspect import Inspect
from treetune.runs.foreign.nemo_gym import NemoGym
from treetune.runs.foreign.program import Program
from treetune.runs.foreign.skyrl import SkyRL
from treetune.runs.foreign.trl import Trl
from treetune.runs.foreign.verl import Verl

PROGRAMS: tuple[Program, ...] = (Verl(), Trl(), SkyRL(), Inspect(), NemoGym(), Atif())
"""The programs, in the order in which they are tried."""
