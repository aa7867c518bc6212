"""A RunSet is a folder of runs that were requested together, for several models or several tasksets, each in its own
run folder.

    with RunSet(Path("runs/both")).begin(plans) as folders: ...   # then play them, one after the other
    RunSet(Path("runs/both")).compare()            # each taskset's models with the first of them

`runs.json` lists them in order. All runs are created before the first is played, so an interrupted set can be resumed
by its folder alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from treetune.config.trust import FINGERPRINT
from treetune.errors import ResumeError, UsageError, writing
from treetune.evaluation.comparison import Comparison, compare
from treetune.evaluation.plan import EvalPlan
from treetune.runs.folder import name_run, slug
from treetune.runs.run import Run, is_run
from treetune.system.digest import canonical
from treetune.system.folders import write_atomically

SET = "runs.json"


class RunSet:
    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def named_after(cls, plans: Sequence[EvalPlan]) -> RunSet:
        """Creates a set in a new folder below `runs`."""
        tasksets = {plan.evaluation.taskset.name for plan in plans}
        models = {plan.model for plan in plans}
        one, other = (names.pop() if len(names) == 1 else None for names in (tasksets.copy(), models.copy()))
        return cls(name_run(one or f"{len(tasksets)}-tasksets", other or f"{len(models)}-models"))

    @property
    def exists(self) -> bool:
        return (self.path / SET).is_file()

    @property
    def names(self) -> list[str]:
        if not self.exists:
            return []
        try:
            found = msgspec.json.decode((self.path / SET).read_bytes(), type=dict[str, list[str]])["runs"]
        except (OSError, KeyError, msgspec.MsgspecError) as error:
            raise ResumeError(f"{self.path / SET} cannot be read: {error}", remedy="name its run folders") from None
        if any(name in ("", ".", "..") or Path(name).name != name for name in found):
            raise ResumeError(
                f"{self.path / SET} names folders outside of it", remedy="name the run folders themselves"
            )
        return found

    @property
    def folders(self) -> list[Path]:
        """The folders of runs that were started."""
        return [self.path / name for name in self.names if (self.path / name / FINGERPRINT).exists()]

    def take_up(self) -> list[Path]:
        """The folders to resume. Refused if the process was killed before every run was created."""
        if missing := [name for name in self.names if self.path / name not in self.folders]:
            problem = f"{self.path} has runs that were never started: {', '.join(missing)}"
            raise ResumeError(problem, remedy="name TARGET and models again, with --resume")
        return self.folders

    def name(self, plans: Sequence[EvalPlan]) -> list[str]:
        """Names a folder for each plan. The same plans get the same names; equal plans are numbered."""
        seen: Counter[str] = Counter()
        names = []
        for plan in plans:
            name = f"{slug(plan.evaluation.taskset.name)}--{slug(plan.model)}"
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
        return names

    @contextmanager
    def begin(
        self,
        plans: Sequence[EvalPlan],
        names: Sequence[str] | None = None,
        *,
        resume: bool = False,
        rescore: bool = False,
        trust: bool = False,
    ) -> Iterator[list[Path]]:
        """Opens the run folder of every plan, under `names` if given; with `resume`, existing folders are resumed."""
        if is_run(self.path):
            raise UsageError(f"{self.path} contains a single run", remedy="pass another -o for several")
        if self.exists and not resume:
            remedy = "pass --resume to continue them, or another -o"
            raise UsageError(f"{self.path} already contains runs", remedy=remedy)
        if resume and not self.exists:
            raise ResumeError(f"{self.path} contains no runs to resume", remedy="leave out --resume, or correct -o")
        names, known = names or self.name(plans), self.names
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            named = {"runs": [*known, *(name for name in names if name not in known)]}
            write_atomically(self.path / SET, msgspec.json.format(msgspec.json.encode(named)) + b"\n")
        with ExitStack() as opened:
            paths = [self.path / name for name in names]
            for plan, path in zip(plans, paths, strict=True):
                begun = (path / FINGERPRINT).exists()
                opened.enter_context(plan.begin(path, resume=begun, rescore=rescore and begun, trust=trust))
            yield paths

    def compare(self) -> list[Comparison]:
        """Compares the runs of each taskset with the first of them. Runs without a shared task are left out."""
        by_taskset: dict[str, list[Run]] = {}
        for folder in self.folders:
            run = Run(folder)
            by_taskset.setdefault(canonical(run.config.get("taskset")).decode(), []).append(run)
        found = []
        for first, *others in by_taskset.values():
            for other in others:
                with suppress(UsageError):
                    found.append(compare(first, other))
        return found
