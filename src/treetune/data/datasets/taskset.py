"""A DatasetTaskset is declared in a config over a Hugging Face dataset or files, and builds cached parquet.

    source = {"args": ["openai/gsm8k"], "kwargs": {"name": "main", "split": "train"}}
    taskset = DatasetTaskset({"loading_params": source, "prompt_template": "{question}"})
    taskset.get_parquet_path()      # builds once; afterwards a look at the cache

Subclass it to parse answers or add columns: override `_make_map_fn`, or `build_dataset` for full control.
"""

from __future__ import annotations

import ast
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from treetune.config.code_files import own_files, parse_again, with_imports
from treetune.config.plugins import file_of
from treetune.config.structs import CodeName, FileName, declared_values, to_plain
from treetune.core.finding import Flaw
from treetune.core.task import Task
from treetune.data.datasets.config import DatasetConfig
from treetune.data.datasets.dataset_rows import BUILDER_VERSION, DatasetRows
from treetune.data.datasets.images import describe_files
from treetune.data.rows.cache import Cache, Sidecar, config_hash, impl_hash
from treetune.data.sources.loading_params import check_loading
from treetune.errors import ConfigError, StorageError, TasksetError, user_code

if TYPE_CHECKING:
    import datasets
    from treetune.data.datasets.build import Engine, Progress
    from treetune.data.sources.loading import LibraryDataset
    from treetune.data.sources.local_files import LocalFiles


class DatasetTaskset(DatasetRows):
    OPEN_KEYS: ClassVar[bool] = False
    """Whether the config takes any key, as in a subclass that declares no config type."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.OPEN_KEYS = "config_type" not in vars(cls)
        cls.overrides_rows = cls._make_map_fn is not DatasetTaskset._make_map_fn
        cls.overrides_build = cls.build_dataset is not DatasetTaskset.build_dataset

    def __init__(self, config: Mapping[str, Any] | DatasetConfig, cache_dir: str | Path | None = None) -> None:
        super().__init__(config, cache_dir)
        self._opened: LibraryDataset | LocalFiles | None = None
        self._rows_built: int | None = None
        """The number of rows of its file, in any format, once it is built."""
        self._reported = False
        """Whether its flaws were reported. Another process that gets the taskset does not report them again."""

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Self:
        """Build the taskset. A user's class gets plain values, whatever form its config had."""
        plain = to_plain(config)
        return cls(plain.pop("extra") | plain, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_opened": None, "_reported": True}

    # Called by recipes and overridden by subclasses

    def build_dataset(self) -> datasets.Dataset:
        """Return the rows as a Hugging Face dataset, as in the parquet file: every source row passed through
        `_make_map_fn()` and selected as the config says."""
        import tempfile

        import pyarrow.parquet as pq

        import datasets
        from treetune.data.datasets.build import write_rows

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.parquet"
            write_rows(self, self._load_source(), path, "verl", made=False)
            return datasets.Dataset(pq.read_table(path).replace_schema_metadata(None))

    def _make_map_fn(self) -> Callable[..., Any]:
        """Return the function that makes a trainer's row from a source row and its index."""
        from treetune.data.datasets.map_function import map_function

        return map_function(self.config)

    def get_parquet_path(self, format: str = "verl") -> str:
        """Return the path of the cached parquet file; build it if it is missing."""
        return str(self.build(format)[1])

    # The cache

    def build(
        self, format: str = "verl", *, force: bool = False, engine: Engine = "local", on_rows: Progress | None = None
    ) -> tuple[Sidecar, Path, bool]:
        """Return the sidecar, the path of the cached file, and whether it was there already; build it if not."""
        cache, key = Cache(self.cache_dir), self.cache_key(format)

        def write(path: Path) -> Sidecar:
            from treetune.data.datasets.build import build, write_draws

            if self.endless:
                return write_draws(self, path, self._unscheduled.build(format, engine=engine, on_rows=on_rows))
            return build(self, self.open_source(), path, format, engine=engine, on_rows=on_rows)

        sidecar, hit = cache.get_or_build(key, write, force=force)
        self._rows_built = sidecar.rows
        self._opened = None
        for flaw in sidecar.flaws if not self._reported else ():
            warnings.warn(f"{self._title()}: {flaw}", stacklevel=1)  # one line: Python shows each once
        if hit and not self._reported and (unseen := _find_unseen(self._code_files())):
            warnings.warn(
                f"{self._title()} is taken from the cache, which does not notice changes to what the code itself "
                f"reads: {unseen[0]}{', and more' if len(unseen) > 1 else ''}. If rows depend on it, {_NAME_IT}",
                stacklevel=1,
            )
        self._reported = True
        return sidecar, cache.path(key), hit

    def _code_files(self) -> list[Path]:
        """Return the user's code files that make rows."""
        of_class = own_files(type(self)) if self.overrides_rows or self.overrides_build else []
        return [*of_class, *(part for file in self._named_code() for part in with_imports(file.resolve()))]

    def _named_code(self) -> list[Path]:
        """Return the code files that its config names."""
        return [file for spec in chain(*declared_values(self.config, CodeName).values()) if (file := file_of(spec))]

    def _title(self) -> str:
        """Return its name for warnings. A task without a `data_source` is named after its source."""
        params = self.config.loading_params
        if self.config.data_source != "unknown":
            return self.name
        return f"{self.name} ({', '.join(params.patterns or map(str, params.args))})"

    def cache_key(self, format: str = "verl") -> str:
        """Return `{impl_hash}_{config_hash}`: the hash of the code, and the hash of the config and its data."""
        config = self.config
        if faults := check_loading(config.loading_params):
            raise ConfigError(faults)
        paths = {str(path): path for path in config.loading_params.local_sources()}
        profile = config.profile.path if config.profile is not None else None
        files = [*chain(*declared_values(config, FileName).values()), *([profile] if profile is not None else [])]
        named = {name: Path(name).expanduser() for name in files}
        paths |= {name: path for name, path in named.items() if path.exists()}
        try:
            contents = {name: Cache(self.cache_dir).hash_content(path) for name, path in paths.items()}
        except OSError as error:
            raise StorageError(f"{error.filename or 'a file'} cannot be read: {error.strerror or error}") from None
        # A file may hold several classes, and the scorer, which includes the path of its class, is part of every row.
        scorer = None if self.row_scorer is None else self.row_scorer.text
        asked = {**config.for_key(), "format": format, "class": type(self).__qualname__, "scorer": scorer}
        if config.images:
            asked["image_files"] = describe_files(config)
        code = impl_hash(type(self), DatasetTaskset, self._named_code(), BUILDER_VERSION)
        return f"{code}_{config_hash(asked, contents)}"

    def order_key(self, format: str) -> str | None:
        """Identifies the pass rates that its rows are drawn by, if it has any."""
        return self.cache_key(format) if self.config.profile is not None else None

    def check_source(self, format: str = "verl", *, force: bool = False) -> None:
        """Raise every fault of the config that the source's columns show, unless the file is built. The source is kept
        for the build."""
        # An overridden `build_dataset` opens its own source.
        if self.overrides_build or (not force and Cache(self.cache_dir).hit(self.cache_key(format), quiet=True)):
            return
        from treetune.data.datasets.row_builder import RowBuilder

        opened = self._load_source()
        builder = RowBuilder(self, opened.columns, made=False)
        if self.overrides_rows:
            builder.check_first(opened.batches(1))
        self._opened = opened

    def open_source(self) -> LibraryDataset | LocalFiles:
        """Open the source of the rows: the dataset, or the result of an overridden `build_dataset`."""
        if not self.overrides_build:
            opened, self._opened = self._opened, None
            return opened or self._load_source()
        import datasets
        from treetune.data.sources.loading import LibraryDataset

        whose = f"build_dataset() of {type(self).__name__}"
        with user_code(whose):
            dataset: Any = self.build_dataset()
        if isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
            return LibraryDataset(dataset)
        raise TasksetError(
            f"{whose} returned a {type(dataset).__name__}, not a dataset",
            remedy="return a datasets.Dataset, as made by Dataset.from_list(rows) or "
            "Dataset.from_dict(columns), or one split of a DatasetDict; or override _make_map_fn, which makes one row",
        )

    def _load_source(self) -> LibraryDataset | LocalFiles:
        from treetune.data.sources.loading import open_source

        return open_source(self.config.loading_params)

    # Taskset methods

    def count(self) -> int:
        known = self._unscheduled._rows_built
        return self._built[0].rows if known is None else known

    def task_at(self, index: int) -> Task:
        from treetune.data.rows.formats import FORMATS

        return FORMATS["verl"].task_of_pruned(self._rows[index], whole=False)

    @cached_property
    def _rows(self) -> Any:
        from treetune.data.rows.row_store import ParquetRows

        return ParquetRows(str(self._built[1]))

    def list_uids(self) -> Iterable[tuple[str, str]]:
        if self.overrides_rows or self.overrides_build or "uid" in self.config.extra_fields:
            return super().list_uids()  # such rows may have their own uid
        from treetune.data.arrow_values import read_extra

        uids = read_extra(self._built[1], "uid")
        return ((uid, self.config.data_source) for uid in ([] if uids is None else uids.to_pylist()))

    @property
    def _built(self) -> tuple[Sidecar, Path, bool]:
        """The built file that its tasks are read from."""
        with self._where_declared():
            return self._unscheduled.build()

    @contextmanager
    def _where_declared(self) -> Iterator[None]:
        """Add the place of a key's declaration to config faults that only the data shows."""
        try:
            yield
        except ConfigError as error:
            raise self._declared.place(error) from None

    @cached_property
    def _unscheduled(self) -> Self:
        """Return the taskset without its schedule: every row that the profile keeps, once."""
        profile = self.config.profile
        if profile is None or not self.endless:
            return self
        other = copy.copy(self)
        other.config = msgspec.structs.replace(self.config, profile=profile.selection)
        other._reported, other._rows_built = self._reported, None
        return other

    def find_flaws(self) -> list[Flaw]:
        return self._built[0].flaws

    def source(self) -> str | None:
        with self._where_declared():
            return self._unscheduled.cache_key()


# Inputs that the cache cannot see

_NAME_IT = (
    "name it in the config, a file in a key of type treetune.config.structs.FileName, a variable as "
    "KEY: ${oc.env:NAME}; --force builds it again"
)

_READERS = ("read_text", "read_bytes", "open")


def _find_unseen(files: Iterable[Path]) -> list[str]:
    """Find calls such as `open("table.json")` and `os.environ["X"]` in code files, with their places."""
    return [f"{file.name}, line {line}, reads {what}" for file in files for line, what in _find_in(file)]


def _find_in(file: Path) -> Iterator[tuple[int, str]]:
    try:
        tree = parse_again(partial(ast.parse, file.read_bytes()))
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _name_file(node)) is not None:
            yield node.lineno, f"the file {name!r}"
        elif (name := _name_variable(node)) is not None:
            yield getattr(node, "lineno", 0), f"the variable {name!r}"


def _name_file(call: ast.Call) -> str | None:
    """Return the file that a call opens for reading, if its name is a literal."""
    function = call.func
    if isinstance(function, ast.Name) and function.id == "open":
        modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        written = any(isinstance(mode, ast.Constant) and set("wax") & set(str(mode.value)) for mode in modes)
        return None if written else _first_text(call)
    if isinstance(function, ast.Attribute) and function.attr in _READERS and isinstance(function.value, ast.Call):
        made = function.value.func
        if (made.id if isinstance(made, ast.Name) else getattr(made, "attr", "")) == "Path":
            return _first_text(function.value)
    return None


def _name_variable(node: ast.AST) -> str | None:
    """Return the environment variable that a node reads."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_environ(node.value):
        return str(node.slice.value) if isinstance(node.slice, ast.Constant) else None
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr == "get" and _is_environ(function.value):
        return _first_text(node)
    called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return _first_text(node) if called == "getenv" else None


def _is_environ(node: ast.expr) -> bool:
    return (node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")) == "environ"


def _first_text(call: ast.Call) -> str | None:
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
