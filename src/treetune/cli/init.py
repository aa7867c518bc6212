"""`treetune init`: creates a taskset as an installable package with a passing test, or a script that writes a dataset.

Each folder of `templates` is a part of the result: `package` is in every package, `server` is optional, and the others
are the templates.
"""

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
from treetune.config.plugins import tasksets
from treetune.errors import UnknownNameError, UsageError, writing

_TEMPLATES = resources.files("treetune.cli").joinpath("templates")
ABOUT = {
    "answer": "A question with one answer, which is compared with the ground truth.",
    "tools": "A question that takes calls of tools to answer.",
    "judge": "Texts that a model judges, by criteria; a script stands in for it until you name one.",
    "code": "Problems whose answers are code, which must pass tests in a sandbox.",
    "dataset": "Questions from a file of rows, with a training and a test split.",
    "multi-turn": "An environment of several turns: it answers each action, and pays at the end.",
}
"""The templates, each with the first sentence of its README."""


def init_command(
    name: Annotated[str, typer.Argument(help="The name of the new taskset, such as colour-names.")],
    folder: Annotated[Path, option("Where to create the new folder.", "-o", "--output")] = Path("."),
    template: Annotated[str, option(f"The template: {', '.join(ABOUT)}.", "-t", "--template")] = "answer",
    server: Annotated[bool, option("Add a Dockerfile that serves it.", "--server")] = False,
    dataset: Annotated[
        bool, option("Instead of a package, create a script that writes parquet files for SkyRL.")
    ] = False,
) -> None:
    """Create a taskset: an installable package with a passing test, a config and a README; with --server, also the
    files to run it as a container."""
    if dataset and (server or template != "answer"):
        other = "--server" if server else "--template"
        raise UsageError(f"--dataset and {other} exclude each other", remedy="pass one of them")
    if template not in ABOUT:
        raise UnknownNameError.of("template", template, ABOUT)
    module = re.sub(r"[ ._-]+", "_", name.lower()).strip("_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module):
        remedy = "use letters from a to z, digits and dashes, beginning with a letter; -o sets the folder"
        raise UsageError(f"{name!r} cannot be turned into a Python name", remedy=remedy)
    if not dataset and _hides_another(module):
        module += "_taskset"
    # The package keeps the spelling that was typed, if possible.
    id = module if name == module else module.replace("_", "-")
    if not dataset and id in tasksets.names():  # only one of the two would be found
        raise UsageError(f"a taskset {id!r} already exists: {tasksets.names()[id]}", remedy="choose another name")
    cls = "".join(part.capitalize() for part in module.split("_"))
    place = folder / (module if dataset else id)
    if os.path.lexists(place):
        raise UsageError(f"{place} already exists", remedy="choose another name, or another folder with -o")
    title = module.replace("_", " ").capitalize()
    names = {"title": title, "module": module, "cls": cls, "id": id, "about": ABOUT[template]}
    parts = ["skyrl-rows"] if dataset else ["package", template, *(["server"] if server else [])]
    with writing(place):
        place.mkdir(parents=True)
        for part in parts:
            _write(part, place, names)
    steps = "skyrl-rows" if dataset else "package"
    typer.echo(read_template(f"next_steps/{steps}", place=str(place), **names), nl=False)


def _write(part: str, place: Path, names: dict[str, str]) -> None:
    """Writes the files of a part, which replace those of an earlier part; `README.part` is appended to the README."""
    for template in _TEMPLATES.joinpath(part).iterdir():
        file = template.name.removesuffix(".template")
        text = read_template(f"{part}/{file}", **names)
        if file == "README.part":
            with (place / "README.md").open("a") as readme:
                readme.write(text)
        else:
            (place / file.replace("module", names["module"])).write_text(text)


def read_template(name: str, **values: str) -> str:
    """The text of `templates/NAME.template` with its values filled in."""
    return Template(_TEMPLATES.joinpath(f"{name}.template").read_text()).substitute(values)


def _hides_another(module: str) -> bool:
    """Whether a file or class of this name would shadow something: a keyword, a name of Treetune, another module."""
    cls = "".join(part.capitalize() for part in module.split("_"))
    if keyword.iskeyword(module) or keyword.iskeyword(cls) or module == "treetune":
        return True
    if cls in treetune.__all__ or f"{cls}Config" in treetune.__all__:
        return True
    spec = find_spec(module)
    return spec is not None and spec.origin is not None  # a folder without code shadows nothing
