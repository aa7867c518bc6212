"""Where the code of a task runs: apart from the host's files, network, processes and environment, within limits.

    sandbox = Bubblewrap()
    result = await sandbox.run([sandbox.python, "-c", "print(6 * 7)"], limits=SandboxLimits(seconds=2))
    result.text, result.ended   # "42\\n", Ended.COMPLETED

Where no sandbox can start there is no run: `SandboxUnavailable` says why and what to do. `probe()` tells it beforehand.
"""

from treetune.sandbox.limits import Ended, Result, SandboxLimits, SandboxUnavailable
from treetune.sandbox.one_shot import Bubblewrap
from treetune.sandbox.probe import Capability, probe, require

__all__ = ["Bubblewrap", "Capability", "Ended", "Result", "SandboxLimits", "SandboxUnavailable", "probe", "require"]
