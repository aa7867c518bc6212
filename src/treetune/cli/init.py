"""`treetune init`: scaffold a taskset, a package to serve, or the script of a dataset, with a test that passes."""

from __future__ import annotations

import keyword
import os
import re
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated

import typer

import treetune
from treetune.cli.options import option
from treetune.errors import StorageError, UsageError
from treetune.plugins import tasksets

_TEMPLATES = resources.files("treetune.cli").joinpath("templates")


def init_command(
    name: Annotated[str, typer.Argument(help="The name of the new taskset, such as colour-names.")],
    folder: Annotated[Path, option("Where the new folder goes.", "-o", "--output")] = Path("."),
    dataset: Annotated[bool, option("A script that writes parquet files for SkyRL.", "--dataset")] = False,
    server: Annotated[bool, option("A package to install and serve, with a Dockerfile.", "--server")] = False,
) -> None:
    """Scaffold a taskset with a test that passes and a config; with --dataset, a script that makes a dataset; with
    --server, a package that others install, serve, or run as a container."""
    if dataset and server:
        raise UsageError("--dataset and --server are two things", remedy="pass one of them")
    module = re.sub(r"[ ._-]+", "_", name.lower()).strip("_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module):
        remedy = "use letters from a to z, digits and dashes, a letter first; -o names another folder"
        raise UsageError(f"{name!r} makes no Python name", remedy=remedy)
    if not dataset and _hides_another(module):
        module += "_taskset"
    # A package goes by the name that it was given, as far as it is one.
    id = module if name == module else module.replace("_", "-")
    if server and id in tasksets.names():  # one of the two would be found in the place of the other
        raise UsageError(f"there is a taskset {id!r} already, {tasksets.names()[id]}", remedy="choose another name")
    cls = "".join(part.capitalize() for part in module.split("_"))
    kind, place = "dataset" if dataset else "server" if server else "taskset", folder / (id if server else module)
    if os.path.lexists(place):
        raise UsageError(f"{place} exists already", remedy="choose another name, or another folder with -o")
    names = {"title": module.replace("_", " ").capitalize(), "module": module, "cls": cls, "id": id}
    try:
        place.mkdir(parents=True)
        for template in _TEMPLATES.joinpath(kind).iterdir():
            file = template.name.removesuffix(".template")
            (place / file.replace("module", module)).write_text(read_template(f"{kind}/{file}", **names))
    except OSError as error:
        raise StorageError(f"cannot write to {place}: {error.strerror or error}") from error
    typer.echo(read_template(f"next_steps/{kind}", place=str(place), **names), nl=False)


def read_template(name: str, **values: str) -> str:
    """The text of `templates/NAME.template` with the values filled in."""
    return Template(_TEMPLATES.joinpath(f"{name}.template").read_text()).substitute(values)


def _hides_another(module: str) -> bool:
    """Whether a file or class of this name would hide something: a keyword, a name of ours, another module."""
    cls = "".join(part.capitalize() for part in module.split("_"))
    if keyword.iskeyword(module) or keyword.iskeyword(cls) or module == "treetune":
        return True
    if cls in treetune.__all__ or f"{cls}Config" in treetune.__all__:
        return True
    spec = find_spec(module)
    return spec is not None and spec.origin is not None  # a mere folder, such as an earlier scaffold, hides nothing
