"""Row filters: what an expression can say, that nothing else gets through, and that it computes as Python does."""

from __future__ import annotations

import contextlib
import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_code

from treetune.data.datasets.selection import Filter
from treetune.errors import ConfigError

ROW = {
    "question": "How many?  ",
    "difficulty": "easy",
    "pass_rate": 0.5,
    "meta": {"level": 3, "tags": ["a", "b"]},
    "n": 7,
    "missing": None,
    "flag": True,
    "len": 4,
}


def kept(text: str) -> bool:
    return Filter(text, list(ROW)).keeps(ROW)


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Filter(text, list(ROW))
    assert {path for path, _ in caught.value.faults} == {"filter"}
    return [problem for _, problem in caught.value.faults]


@pytest.mark.parametrize(
    "text",
    [
        "len(question) < 500 and difficulty in ['easy', 'hard'] and 0.1 < pass_rate < 0.9",
        "difficulty not in ('hard',) or n == 0",
        "missing is None and n is not None and flag is True",
        "missing is None or missing > 3",
        "n % 2 == 1 and -n < +n and n // 2 == 3 and n / 2 == 3.5 and n * 2 - 1 == 13",
        "(1 if flag else 2) == 1 and not (n > 8)",
        "meta['level'] == 3 and meta['tags'][0] == 'a' and meta['tags'][-1] == 'b'",
        "n in {7, 8}",
        "strip(question) == 'How many?' and lower('Z') > upper('z') and startswith(question, 'How')",
        "endswith(strip(question), ('?', '!')) and contains(question, 'many') and contains(meta['tags'], 'b')",
        r"matches(question, '\w+ \w+\?') and matches(question, r'\bmany\b') and not matches(question, '^many')",
        "min(n, 9) == 7 and max(1, n) == 7 and abs(-n) == 7",
        "int('7') == n and float('0.5') == pass_rate and str(n) == '7' and bool(n) and int('ff', 16) == 255",
        "question",
        "n > 3  # a comment",
        "\n  n > 3\n  and flag\n",
    ],
)
def test_an_expression_over_columns_decides(text):
    assert kept(text) is True
    assert kept(f"not ({text}\n)") is False


def test_a_column_may_have_the_name_of_a_function():
    assert kept("len == 4 and len(difficulty) == len")


def test_the_columns_used_are_known_in_order():
    assert Filter("n > 1 and len(question) > n", list(ROW)).columns == ("n", "question")


def test_an_unknown_column_is_named_with_the_nearest_and_with_those_there_are():
    (problem,) = faults("pas_rate < 1")
    assert problem.startswith(f"no column 'pas_rate'; did you mean 'pass_rate'?; available: {', '.join(ROW)}")


def test_an_unknown_function_is_named_with_the_nearest_and_with_those_there_are():
    (problem,) = faults("lenght(question) < 3 or n > 1")
    assert "no function 'lenght'; did you mean" in problem
    assert "the functions abs, bool, contains" in problem


def test_every_fault_is_reported():
    assert len(faults("a < 1 and b(n) and n.real")) == 3


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("difficulty = 'easy'", "=="),
        ("n > 1 && n < 3", "available: and, or, not"),
        ("!flag", "available: and, or, not"),
        ("(n > 1) & flag", "available: and, or, not"),
        ("~flag", "available: and, or, not"),
        ("n == null", "None, True, False"),
        ("flag == true", "None, True, False"),
        ("n ** 2 == 49", "is not available"),
        ("n is 3", "compare with == or !="),
        ("n > ", "is not an expression: "),
        ("n > 'a", "is not an expression: "),
        ("", "leave the key out"),
        ("# nothing", "not a condition"),
        ("n > 1, flag", "join conditions with `and`"),
        ("n[0:2] == 1", "is not available"),
        ("lower(question).strip() == ''", "no function 'lower(question).strip'"),
        ("question.startswith('a')", "the functions abs, bool, contains"),
        ("max < 3", "no column 'max'"),
        ("len(question, n) > 1", "len takes 1 arguments"),
        ("int() > 1", "int takes 1 to 2 arguments"),
        ("matches(question, '(')", "not a regular expression: "),
        (r"matches(question, '\bmany\b')", "write the pattern as r'...'"),
        ("matches(question, difficulty)", "written out"),
        ("n > 1 or " * 300 + "flag", "file.py:function"),
    ],
)
def test_a_mistake_is_explained_with_its_remedy(text, remedy):
    assert remedy in faults(text)[0]


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "__import__",
        "__builtins__",
        "__debug__",
        "().__class__.__bases__[0].__subclasses__()",
        "''.__class__",
        "question.format",
        "question.format(n)",
        "question.__len__()",
        "f'{question}'",
        "f'{question.__class__}'",
        "(x := n) > 1",
        "x := n",
        "lambda: n",
        "(lambda: n)()",
        "[x for x in question]",
        "x for x in question",
        "any(x for x in question)",
        "{'a': n}",
        "[*question]",
        "max(*question)",
        "max(question, key=len)",
        "len(**meta)",
        "abs",
        "(len)(question)(n)",
        "[len][0](question)",
        "(len if n else abs)(question)",
        "eval('n')",
        "exec('n')",
        "open('/etc/passwd')",
        "getattr(n, 'real')",
        "type(n)",
        "yield n",
        "await n",
        "b'bytes' == n",
        "1j == n",
        "... == n",
        "n << 2",
        "n ^ 2",
        "n @ n",
        "meta[(lambda: n)()]",
        "n; n",
        "import os",
        "n\x00",
        "n > '\ud800",
    ],
)
def test_what_could_escape_is_refused(text):
    faults(text)


def test_dunder_names_are_refused_even_where_they_are_columns():
    with raises_code("config", "'__class__'"):
        Filter("__class__ == 1", ["__class__"])


@pytest.mark.parametrize("text", ["-" * 1990 + "n", "not " * 490 + "n", "(" * 900 + "n" + ")" * 900, "n[0]" * 480])
def test_deep_nesting_is_refused_or_works_and_never_crashes(text):
    with contextlib.suppress(ConfigError):
        Filter(text, list(ROW))


@pytest.mark.parametrize(
    "text",
    [
        "question * 1000000000 == ''",
        "1000000000 * question == ''",
        "[n] * 1000000000 == []",
        "'%1000000000d' % n == ''",
        "n / 0 > 1",
        "int('1' + '0') / missing",
    ],
)
def test_work_without_end_is_refused_at_run_time(text):
    condition = Filter(text, list(ROW))
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        condition.keeps(ROW)


def test_a_row_that_does_not_fit_is_told_with_values_and_a_guard():
    condition = Filter("missing > 3 and n > 1", list(ROW))
    with pytest.raises(ValueError) as caught:
        condition.keeps(ROW)
    assert "'missing > 3 and n > 1'" in str(caught.value)
    assert "(missing = None, n = 7); guard it: missing is not None and (missing > 3 and n > 1)" in str(caught.value)


def test_text_compared_with_a_number_is_told_to_convert():
    with pytest.raises(ValueError, match=r"difficulty = 'easy'.*float\(\.\.\.\)"):
        kept("difficulty > 3")


@pytest.mark.parametrize(
    "text", ["ok", "not ok", "ok and n", "n if ok else n", "bool(ok)", "n == 7 and (n or ok) and ok"]
)
def test_text_that_says_false_is_not_taken_for_true(text):
    keep = Filter(text, ["ok", "n"])
    with pytest.raises(
        ValueError, match=re.escape("'false' is text, and any text counts as true; compare it: column ==")
    ):
        keep.keeps({"ok": "false", "n": 7})
    keep.keeps({"ok": False, "n": 7})
    keep.keeps({"ok": "maybe", "n": 7})
    assert Filter("ok == 'false'", ["ok"]).keeps({"ok": "false"})


def test_functions_on_text_name_what_they_were_given():
    with pytest.raises(ValueError, match="expected text, got None"):
        kept("lower(missing) == 'a'")
    with pytest.raises(ValueError, match="no 'depth'"):
        kept("meta['depth'] > 1")


def test_a_row_without_the_column_is_told():
    with pytest.raises(ValueError, match="the row has no 'n'"):
        Filter("n > 1", ["n"]).keeps({"m": 1})


def test_long_values_are_shortened_in_messages():
    with pytest.raises(ValueError) as caught:
        Filter("n > 1", ["n"]).keeps({"n": "x" * 100_000})
    assert len(str(caught.value)) < 300


def test_parsing_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Filter(r"matches(question, '\d') and '' is not None", list(ROW))


COMPARISONS = st.sampled_from(["<", "<=", "==", "!=", ">", ">="])
NUMBERS = st.recursive(
    st.sampled_from(["n", "m", "0", "1", "13", "len(s)"]),
    lambda numbers: (
        st.builds("{} {} {}".format, numbers, st.sampled_from(["+", "-", "*", "//", "%"]), numbers)
        | st.builds("({})".format, numbers)
        | st.builds("-{}".format, numbers)
        | st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), numbers, numbers)
        | st.builds("({} if {} {} {} else {})".format, numbers, numbers, COMPARISONS, numbers, numbers)
    ),
    max_leaves=4,
)
TEXTS = st.recursive(
    st.sampled_from(["s", "t", "''", "'a'", "'b c'", "str(n)", "s[0]", "t[-1]", "s[n]"]),
    lambda texts: st.builds("({} + {})".format, texts, texts),
    max_leaves=3,
)
CONDITIONS = st.recursive(
    st.builds("{} {} {}".format, NUMBERS, COMPARISONS, NUMBERS)
    | st.builds("{} {} {} {} {}".format, NUMBERS, COMPARISONS, NUMBERS, COMPARISONS, NUMBERS)
    | st.builds("{} {} {}".format, TEXTS, COMPARISONS | st.sampled_from(["in", "not in"]), TEXTS)
    | st.builds("{} in [{}, {}]".format, NUMBERS, NUMBERS, NUMBERS),
    lambda conditions: (
        st.builds("{} {} {}".format, conditions, st.sampled_from(["and", "or"]), conditions)
        | st.builds("not ({})".format, conditions)
    ),
    max_leaves=3,
)


@settings(max_examples=3 * settings.default.max_examples)
@given(
    text=CONDITIONS,
    row=st.fixed_dictionaries(
        {
            "n": st.integers(-20, 20),
            "m": st.integers(),
            "s": st.text(max_size=4),
            "t": st.sampled_from(["", "a", "b c"]),
        }
    ),
)
def test_expressions_compute_what_python_computes(text, row):
    condition = Filter(text, list(row))
    try:
        expected = bool(eval(text, {}, dict(row)))  # noqa: S307 - the reference, on generated text
    except (ZeroDivisionError, IndexError):
        with pytest.raises(ValueError):
            condition.keeps(row)
        return
    assert condition.keeps(row) is expected


@settings(max_examples=3 * settings.default.max_examples)
@given(st.text(max_size=40) | st.lists(st.sampled_from([*"()[]{}.,:=<>+-*'\"", "n", "s", "len", "__class__", " if ",
       " else ", " for ", " in ", " lambda ", " not ", "1"]), max_size=12).map("".join))  # fmt: skip
def test_any_text_is_a_filter_or_a_config_error(text):
    try:
        condition = Filter(text, ["n", "s"])
    except ConfigError:
        return
    with contextlib.suppress(ValueError):
        condition.keeps({"n": 3, "s": "abc"})
