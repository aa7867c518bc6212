"""verifiers and prime-rl, in both directions.

    treetune export verifiers TARGET --to my-env/      # a package that vf-eval, verifiers' server and prime-rl load
    treetune eval verifiers:my-env -n 20 -m MODEL      # any installed environment of theirs as a TARGET

`plugin.py` has the classes that an exported package subclasses. verifiers itself is imported only there, and when a
TARGET is one of its environments.
"""

from treetune.trainers.verifiers.package import ALREADY_THERE, ONE_ADVANTAGE, ExportedPackage, export_package

__all__ = ["ALREADY_THERE", "ONE_ADVANTAGE", "ExportedPackage", "export_package"]
