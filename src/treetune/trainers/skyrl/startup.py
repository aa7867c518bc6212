"""Registers Treetune's environments when `skyrl_gym` is imported.

`install_hook()` copies this file next to a `.pth` file that runs it at every start of Python. It imports almost
nothing, because it runs in every program. Treetune is imported only after skyrl_gym.
"""

import _thread
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def register_on_import(environments: dict[str, str], replace: bool) -> None:
    # Some programs, Ray's workers among them, read .pth files twice.
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(environments, replace))


class _Finder:
    """Lets the other finders find skyrl_gym, and registers the environments once it has run."""

    def __init__(self, environments: dict[str, str], replace: bool) -> None:
        self.environments, self.replace = environments, replace
        self.asking: set[int] = set()
        """Threads that are asking the other finders, because one of these may ask this finder."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        thread = _thread.get_ident()
        if name != "skyrl_gym" or thread in self.asking:
            return None
        self.asking.add(thread)
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path)
            spec: Any = next((spec for spec in specs if spec is not None), None)
        finally:
            self.asking.discard(thread)
        execute = getattr(spec and spec.loader, "exec_module", None)
        if execute is not None:  # otherwise it is an empty folder of that name

            def exec_module(module: "Any") -> None:
                execute(module)
                self.register()

            spec.loader.exec_module = exec_module
        return spec

    def register(self) -> None:
        try:
            from treetune.trainers.skyrl.gym import register

            register(replace=self.replace)
            for id, environment in self.environments.items():
                register(environment, id=id, replace=self.replace)
        except Exception as error:
            # skyrl_gym itself works, and the program may not need Treetune's environments.
            import warnings

            warnings.warn(f"Treetune's environments are not known to skyrl-gym: {error}", stacklevel=2)
