r"""Prompt templates: what they accept, what they refuse and how they say it, and that batches equal `str.format`."""

from __future__ import annotations

import pickle
import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treetune.data.datasets.template import Template
from treetune.errors import ConfigError

pa = pytest.importorskip("pyarrow")


def fault(text: str, columns: list[str], text_columns: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        Template(text, columns, text_columns)
    assert {path for path, _ in caught.value.faults} == {"prompt_template"}
    return "\n".join(problem for _, problem in caught.value.faults)


def test_columns_are_filled_in_and_reported_in_order_of_use():
    template = Template("Q: {question}\n({level}, {question})", ["level", "question", "answer"])
    assert template.columns == ("question", "level")
    assert template.format({"question": "1 + 1?", "level": None}) == "Q: 1 + 1?\n(None, 1 + 1?)"


def test_items_conversions_and_specs_work_as_in_str_format():
    text = "{options[0]} {meta[level]} {name!r} {score:.2f} {score:6.1f} {name!s:>6} {{literal}}"
    row = {"options": ["a", "b"], "meta": {"level": 3}, "name": "x", "score": 0.5}
    template = Template(text, list(row))
    assert template.format(row) == text.format(**row)
    assert template.columns == ("options", "meta", "name", "score")


def test_a_missing_column_is_named_with_the_nearest_and_with_those_there_are():
    problem = fault("{qestion} {answer}", ["question", "answer"])
    assert "{qestion} is not a column; did you mean 'question'?; available: question, answer" in problem


def test_every_missing_column_is_reported():
    assert fault("{qestion} {anser}", ["question", "answer"]).count("did you mean") == 2


def test_the_default_takes_the_only_text_column():
    assert Template("{}", ["id", "question"], ["question"]).columns == ("question",)
    assert Template("{}", ["text"]).format({"text": "hello"}) == "hello"
    assert Template("{}", ["id"], []).format({"id": 7}) == "7"


def test_the_default_takes_a_column_that_no_field_could_spell():
    template = Template("{}", ["a.b c[0]"])
    assert template.format({"a.b c[0]": None}) == "None"
    assert template.fill(pa.table({"a.b c[0]": ["x", None]})) == ["x", None]


def test_the_default_asks_which_of_several_text_columns_is_meant():
    problem = fault("{}", ["id", "question", "answer"], ["question", "answer"])
    assert "there are 2: question, answer; set prompt_template" in problem
    assert '"{question}"' in problem
    assert "there are 0" in fault("{}", [])


@pytest.mark.parametrize(
    ("text", "corrected"),
    [
        (r"{question} Answer in \boxed{}.", r"{question} Answer in \boxed{{}}."),
        (r"{question} Use \frac{1}{\sqrt{2}}.", r"{question} Use \frac{{1}}{{\sqrt{{2}}}}."),
        ('{question} { "a": 1 }', '{question} {{ "a": 1 }}'),
        ("{question} {", "{question} {{"),
        ("{question} }", "{question} }}"),
        ("{question} {{done}} {todo}", "{question} {{done}} {{todo}}"),
        ("{question:.3} {0}", "{question:.3} {{0}}"),
    ],
)
def test_stray_braces_are_explained(text, corrected):
    assert "meant literally are doubled" in fault(text, ["question", "answer"])
    assert Template(corrected, ["question", "answer"]).columns == ("question",)


@pytest.mark.parametrize("text", ["Q: {0}", "{}{}", "{:>3}", "{!r}", "{[0]}", "{٣}"])
def test_positional_fields_are_refused(text):
    assert "is a position, and columns have names, as in {question}; available: question" in fault(text, ["question"])


def test_the_first_position_alone_is_the_default():
    assert Template("{0}", ["id", "question"], ["question"]).fill(pa.table({"question": ["a", None]})) == ["a", None]


@pytest.mark.parametrize("column", ["s.t", "3", "a[0]", "s.t[u]", "a b-c"])
def test_a_column_is_named_as_it_is_called(column):
    template = Template(f"<{{{column}}}> {{{column}!r}}", ["s", column, "a"])
    assert template.columns == (column,)
    assert template.fill(pa.table({column: ["x"]})) == ["<x> 'x'"]


def test_items_count_from_the_end_too():
    row = {"list": ["a", "b", "c"], "deep": {"-1": "key", "x": [[1, 2], [3]]}, "s.t": {"u": ["v"]}}
    template = Template("{list[-1]}{list[0]} {deep[-1]} {deep[x][-2][-1]} {s.t[u][0]}", list(row))
    assert template.format(row) == "ca key 2 v"
    assert template.fill(pa.Table.from_pylist([row])) == ["ca key 2 v"]


def test_a_column_named_by_another_is_refused_with_the_way_to_do_it():
    assert "a field must name its column itself" in fault("{a{b}}", ["a", "b"])
    assert "_make_map_fn" in fault("{a{b}}", ["a", "b"])


@pytest.mark.parametrize("text", ["{a:{b}}", "{a:.{b}f}", "{a:{}}", "{a!s:>{b}}"])
def test_a_format_from_a_column_is_refused_with_the_way_to_write_it(text):
    assert "the format of {a} cannot come from a column: write it out, as in {a:.2f}" in fault(text, ["a", "b"])


def test_an_attribute_of_a_mapping_is_its_key():
    assert "a key of a mapping is {a[b]}" in fault("{a.b}", ["a"])


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("{x:.2f}", "3.14159", "3.14"),
        ("{x:05d}", "42", "00042"),
        ("{x:,}", "1234567", "1,234,567"),
        ("{x:6.1f}", " 2 ", "   2.0"),
        ("{x:.0%}", "0.5", "50%"),
        ("{x:>5}", "007", "  007"),
        ("{x!s:>5}", "007", "  007"),
        ("{x}", "007", "007"),
        ("{x:d}", "123456789012345678901234567890", "123456789012345678901234567890"),
    ],
)
def test_a_format_of_numbers_takes_text_that_is_one(text, value, shown):
    row = {"x": value}
    assert Template(text, list(row)).format(row) == shown
    assert Template(text, list(row)).fill(pa.Table.from_pylist([row])) == [shown]


@pytest.mark.parametrize(
    "text",
    [
        "{a.b}",
        "{a.__class__.__init__.__globals__}",
        "{a[0].b}",
        "{a.b[0]}",
        "{a[x][y].z}",
    ],
)
def test_attributes_are_refused_wherever_they_stand(text):
    assert "attribute" in fault(text, ["a", "b"])


@pytest.mark.parametrize("text", ["{a[}", "{a[]}", "{a[0]x}", "{a!}", "{a!x}", "{a:{b:{c}}}", "{a", "a}", "{a{b}}"])
def test_what_str_format_would_refuse_is_refused_at_once(text):
    fault(text, ["a", "b", "c"])


@pytest.mark.parametrize(
    ("text", "row", "parts"),
    [
        (
            "{n} {x:.2f}",
            {"n": 1, "x": "high"},
            ["'high' is not a number, and :.2f formats numbers", "n = 1, x = 'high'"],
        ),
        ("{a[b]}", {"a": {"c": 1}}, ["no 'b'", "a = {'c': 1}"]),
        ("{a[5]}", {"a": [1]}, ["out of range", "a = [1]"]),
        ("{a[b]}", {"a": [1]}, ["a is a list, whose items are numbered: a[0]"]),
        ("{x} {y}", {"x": 1}, ["the row has no 'y'"]),
    ],
)
def test_a_row_that_does_not_fit_is_told_with_its_values_and_the_template(text, row, parts):
    template = Template(text, ["n", "x", "y", "a", "w"])
    with pytest.raises(ValueError) as caught:
        template.format(row)
    assert all(part in str(caught.value) for part in [*parts, repr(text)])


def test_a_batch_that_does_not_fit_raises_the_same_as_its_row():
    template = Template("{n} {x:.2f}", ["n", "x"])
    with pytest.raises(ValueError, match=r"\{x:\.2f\}' does not fit a row: .* x = 'high'\)"):
        template.fill(pa.table({"n": [1], "x": ["high"]}))


ARRAYS = {
    "string": pa.array(["a", None, "", "ü{x}"]),
    "large_string": pa.array(["a", None, "", "ü{x}"], pa.large_string()),
    "string_view": pa.array(["a", None, "", "ü{x}"], pa.string_view()),
    "dictionary": pa.array(["a", None, "b", "a"]).dictionary_encode(),
    "dictionary of ints": pa.array([1, None, 2, 1]).dictionary_encode(),
    "dictionary of floats": pa.array([1.0, None, 1e22, 1.0]).dictionary_encode(),
    "int8": pa.array([-128, None, 127, 0], pa.int8()),
    "int64": pa.array([-(2**63), None, 2**63 - 1, 0]),
    "uint64": pa.array([2**64 - 1, None, 0, 1], pa.uint64()),
    "bool": pa.array([True, None, False, True]),
    "null": pa.nulls(4),
    "float64": pa.array([float("nan"), float("-inf"), -0.0, 1e22]),
    "float32": pa.array([0.1, None, 1e10, 1.0], pa.float32()),
    "decimal": pa.array([Decimal("1.50"), None, Decimal("-0.00"), Decimal("3E+2")], pa.decimal128(10, 2)),
    "timestamp": pa.array([datetime(2024, 1, 2, 3), None, datetime(1, 1, 1), datetime(2024, 1, 2, 3, 4, 5, 6)]),
    "timestamp with zone": pa.array([datetime(2024, 1, 2, tzinfo=UTC), None] * 2, pa.timestamp("us", "UTC")),
    "date": pa.array([date(2024, 1, 2), None] * 2),
    "binary": pa.array([b"a", None, b"", b"\xff"]),
    "list": pa.array([[1, None], None, [], [2]]),
    "struct": pa.array([{"x": 1.5}, None, {"x": None}, {"x": 2.0}]),
    "map": pa.array([[("k", 1)], None, [], [("l", None)]], pa.map_(pa.string(), pa.int64())),
}


def filled(template, table):
    """What `fill` should give: each row by itself."""
    return [None if template.lacks(row) else template.text.format(**row) for row in table.to_pylist()]


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("text", ["{x}", "<{x}> {x}", "{x!r}", "{x!s:>40}"])
def test_a_table_of_any_type_equals_str_format(kind, text):
    table = pa.table({"x": ARRAYS[kind], "unused": [object.__name__] * 4})
    template = Template(text, ["x", "unused"])
    for part in (table, table.slice(1, 2), table.slice(0, 0)):
        assert template.fill(part) == filled(template, part)


def test_extension_values_are_shown_as_python_shows_them():
    table = pa.table({"x": pa.array([bytes(range(16))], pa.uuid())})
    assert Template("{x}", ["x"]).fill(table) == [str(table.to_pylist()[0]["x"])]


def test_a_template_without_columns_is_the_same_text_for_every_row():
    template = Template("say {{hi}}", ["x"])
    assert template.columns == ()
    assert template.fill(pa.table({"x": [1, 2]})) == ["say {hi}"] * 2
    assert Template("", ["x"]).fill(pa.table({"x": [1]})) == [""]


def test_a_template_travels_to_another_process():
    template = pickle.loads(pickle.dumps(Template("{x}!", ["x"])))
    assert template.format({"x": 1}) == "1!"


def test_importing_the_module_does_not_import_pyarrow():
    code = "import sys, treetune.data.datasets.template; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["", "{", "}", "{x}", "{{}}"])
FLOATS = st.floats() | st.sampled_from([float("nan"), float("inf"), -0.0, 1e22, 1e16, 1e-5, 0.1, 123456789.0])
INTS = st.integers(-(2**63), 2**63 - 1)
LEVELS = st.fixed_dictionaries({"b": st.none() | FLOATS, "c d": st.none() | st.lists(TEXT, max_size=2)})
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.none() | TEXT,
            "long text": st.none() | TEXT,
            "whole": st.none() | INTS,
            "real": st.none() | FLOATS,
            "number": FLOATS,
            "flag": st.none() | st.booleans(),
            "list": st.none() | st.lists(st.none() | INTS, max_size=3),
            "pair": st.lists(TEXT, min_size=2, max_size=2),
            "a": LEVELS,
            "nested": st.none() | st.lists(LEVELS, max_size=2),
            "width": st.integers(1, 12),
        }
    ),
    max_size=6,
)
SCHEMA = pa.schema(
    {
        "text": pa.string(),
        "long text": pa.large_string(),
        "whole": pa.int64(),
        "real": pa.float64(),
        "number": pa.float64(),
        "flag": pa.bool_(),
        "list": pa.list_(pa.int64()),
        "pair": pa.list_(pa.string()),
        "a": (level := pa.struct({"b": pa.float64(), "c d": pa.list_(pa.string())})),
        "nested": pa.list_(level),
        "width": pa.int64(),
    }
)
PLAIN = [f"{{{name}}}" for name in SCHEMA.names]
FIELDS = [
    *PLAIN, *(f"{{{name}!{conversion}}}" for name in SCHEMA.names for conversion in "rsa"),
    "{number:.2f}", "{number:+.3e}", "{number:6.1f}", "{width:05d}", "{width:,}", "{pair[0]}", "{pair[1]!r:>9}",
    "{a[b]}", "{a[c d]}", "{a[b]!s:>9}", "{text!s:*^7}", "{text!r:.3}", "{{", "}}", "{{text}}",
    "{{{text}}}",
]  # fmt: skip
LITERALS = TEXT.map(lambda text: text.replace("{", "{{").replace("}", "}}"))


@settings(max_examples=4 * settings.default.max_examples)
@given(rows=ROWS, parts=st.lists(st.sampled_from(PLAIN) | st.sampled_from(FIELDS) | LITERALS, max_size=6))
def test_fill_equals_str_format_byte_for_byte(rows, parts):
    text = "".join(parts)
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    template = Template("{text}" if text == "{}" else text, SCHEMA.names)
    assert template.fill(table) == filled(template, table)
    assert [template.format(row) for row in table.to_pylist()] == [
        template.text.format(**row) for row in table.to_pylist()
    ]


@settings(max_examples=4 * settings.default.max_examples)
@given(
    text=st.lists(
        st.sampled_from([*"{}[]!:.ab0 r", "{a", "{b", "}", "{a}", "[0]", ".real", "{a[", "{{", "}}"]), max_size=9
    ).map("".join)
)
def test_whatever_is_accepted_formats_as_str_format_does_and_never_reads_an_attribute(text):
    class Value:
        """Allows what a template may do, and fails the test on anything else."""

        def __format__(self, spec):
            return f"<{spec}>"

        def __repr__(self):
            return "<value>"

        def __getitem__(self, key):
            return self

        def __getattr__(self, name):
            raise AssertionError(name)

        @property
        def real(self):
            raise AssertionError("real")

    try:
        template = Template(text, ["a", "b"], ["a"])
    except ConfigError:
        return
    row = {"a": Value(), "b": Value()}
    try:
        expected = "{a}".format(**row) if text in ("{}", "{0}") else text.format(**row)
    except (TypeError, ValueError):  # such as a spec that the type of `!r`, a str, does not have
        with pytest.raises(ValueError):
            template.format(row)
        return
    assert template.format(row) == expected
