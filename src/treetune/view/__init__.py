"""The viewer: runs in a browser, and as one page in a file.

    from treetune.view import RunList, ViewServer

The pages are in `page/`: plain modules without a build step. What they ask is answered by `calls.py`.
"""

from treetune.view.calls import Calls
from treetune.view.report import Report, write_report
from treetune.view.run_list import RunList
from treetune.view.server import ViewServer

__all__ = ["Calls", "Report", "RunList", "ViewServer", "write_report"]
