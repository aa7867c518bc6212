"""The viewer shows runs in a browser, or as one page in a file.

    from treetune.view import RunList, ViewServer

The pages are in `page/`: plain modules without a build step. `calls.py` answers their calls with the figures
(`figures.py`) and tables (`tables.py`) of the runs in a `RunList`. `suspicious.py` finds rollouts that a person should
look at. `ViewServer` serves the pages, `write_report` writes them into one file.
"""

from treetune.view.calls import Calls
from treetune.view.report import ExportedReport, write_report
from treetune.view.run_list import RunList
from treetune.view.server import ViewServer

__all__ = ["Calls", "ExportedReport", "RunList", "ViewServer", "write_report"]
