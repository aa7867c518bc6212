"""Wikispeedia: tasks drawn from a graph file, and episodes that walk along its links."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
from itertools import pairwise

import msgspec
import pytest
from command_line import ROOT
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_code

from treetune import Action, build_taskset, make
from treetune.errors import ConfigError
from treetune.tasksets.wikispeedia import LinkGraph

GRAPH = ROOT / "examples" / "wikispeedia" / "links.tsv"


def taskset(**keys):
    return build_taskset({"id": "wikispeedia", "graph": str(GRAPH), **keys})


def play(task, *actions):
    """The steps of an episode."""

    async def run():
        environment = make(task.env_class, task)
        environment.start()
        return [await environment.step(Action.of(action)) for action in actions]

    return asyncio.run(run())


def task_from(source, target="Philosophy", **keys):
    """One with a given start, as it may come back from a file."""
    return msgspec.structs.replace(taskset(**keys)[0], source=source, target=target)


# The tasks


@given(st.integers(0, 10**12), st.integers(0, 3))
def test_a_task_depends_on_seed_and_index_alone(start, seed):
    drawn = taskset(seed=seed)
    again = [drawn[start + number] for number in (2, 0, 1)]
    resumed = taskset(seed=seed)
    assert [resumed[start + number] for number in (0, 1, 2)] == [again[1], again[2], again[0]]


def test_random_access_equals_iteration():
    drawn = taskset(seed=3)
    assert [drawn[index] for index in range(40)] == drawn.select_tasks(40)
    assert pickle.loads(pickle.dumps(drawn)).select_tasks(5) == drawn.select_tasks(5)


def test_seeds_are_apart_and_never_added():
    ends = [[(task.source, task.target) for task in taskset(seed=seed).draw(60)] for seed in range(7, 11)]
    for seed, tasks in enumerate(ends):
        for other in ends[seed + 1 :]:
            for shift in range(4):
                pairs = zip(tasks[shift:], other, strict=False)
                assert sum(one == another for one, another in pairs) < 10
    assert taskset(shuffle={"seed": 8}).select_tasks(5) == taskset(seed=8).select_tasks(5)


@pytest.mark.parametrize(("low", "high"), [(3, 8), (1, 1), (4, 5)])
def test_source_and_target_are_as_far_apart_as_asked(low, high):
    graph = LinkGraph.load(GRAPH)
    distances = set()
    for task in taskset(min_distance=low, max_distance=high).draw(100):
        path = graph.path(task.source, task.target)
        assert len(path) - 1 == task.distance
        assert all(after in graph.links_of(before) for before, after in pairwise(path))
        distances.add(task.distance)
    assert distances == set(range(low, high + 1))


def test_the_prompt_shows_the_sources_links_in_order():
    for task in taskset().draw(20):
        links = [line[2:] for line in task.prompt.splitlines() if line.startswith("- ")]
        assert links == sorted(LinkGraph.load(GRAPH).links_of(task.source))
        assert task.target in task.prompt


def test_gold_is_rewarded_and_valid(treetune):
    result = treetune("eval", "wikispeedia", "--taskset.graph", GRAPH, "-n", "40", "-m", "scripted:gold", "--json")
    assert result.json["mean_reward"] == 1.0
    assert result.json["metrics"]["clicks"] == result.json["metrics"]["distance"] >= 3
    assert treetune("validate", "wikispeedia", "--taskset.graph", GRAPH, "-n", "40").code == 0


def test_a_graph_that_is_too_small_is_refused(tmp_path):
    (tmp_path / "links.tsv").write_text("a\tb\nb\tc\nc\ta\n")
    with raises_code("taskset", "3 to 8 clicks"):
        taskset(graph=str(tmp_path / "links.tsv"))


def test_distances_that_nobody_could_walk_are_refused():
    with raises_code("config", "min_distance"):
        taskset(min_distance=5, max_distance=4)
    with raises_code("config", "max_turns", "max_distance"):
        taskset(max_turns=5)


# An episode


def test_clicking_to_the_target_is_rewarded_and_counted():
    task = taskset()[0]
    steps = play(task, *taskset().gold(task))
    assert [step.reward for step in steps] == [0.0] * (task.distance - 1) + [1.0]
    assert steps[-1].done
    assert steps[-1].info["metrics"]["clicks"] == task.distance
    assert f"You are at: {taskset().gold(task)[0].removeprefix('click ')}" in steps[0].observation.content


def test_back_goes_to_the_article_before_and_is_no_click():
    steps = play(task_from("Cat"), "back", "click Milk", "click Cheese", "back", "back", "back")
    seen = [step.info["answer"] for step in steps]
    assert seen == ["Cat", "Milk", "Cheese", "Milk", "Cat", "Cat"]
    assert "no article to go back to" in steps[0].observation.content
    assert steps[-1].info["metrics"]["clicks"] == 2


@pytest.mark.parametrize(
    "said",
    [
        "click Ancient Egypt",
        "Click: ancient_egypt",
        "I could go back, or to the river.\n\n**click Ancient Egypt**",
        "click Mouse\nNo, better:\n`click [Ancient Egypt].`",
        'click "Ancient Egypt"',
    ],
)
def test_the_last_line_with_an_action_counts_and_marks_are_forgiven(said):
    assert play(task_from("Cat"), said)[0].info["answer"] == "Ancient Egypt"


@pytest.mark.parametrize(
    "said",
    [
        "",
        "Ancient Egypt",
        "click",
        "click Philosophy",
        "clicking Milk",
        "back to Milk",
        "click Milk and Mouse",
        "...." * 99999,
    ],
)
def test_anything_else_stays_where_it_is_and_costs_a_turn(said):
    steps = play(task_from("Cat", max_turns=8), said, *["click"] * 7)
    assert [step.info["answer"] for step in steps] == ["Cat"] * 8
    assert [step.done for step in steps] == [False] * 7 + [True]
    assert steps[-1].truncated
    assert steps[-1].reward == 0.0


def test_thirty_turns_are_the_end():
    steps = play(task_from("Cat"), *["click Milk", "back"] * 15)
    assert [step.done for step in steps] == [False] * 29 + [True]


def test_a_task_of_another_graph_is_not_played(tmp_path):
    copy = tmp_path / "links.tsv"
    shutil.copy(GRAPH, copy)
    task = taskset(graph=str(copy))[0]
    copy.write_text(copy.read_text() + "Cat\tPhilosophy\n")
    with raises_code("environment", "links.tsv"):
        play(task, "back")


# Graph files


def rows():
    return [line.split("\t") for line in GRAPH.read_text().splitlines() if not line.startswith("#")]


def test_all_formats_give_the_same_graph_and_tasks(tmp_path):
    links: dict[str, list[str]] = {}
    for article, link in reversed(rows()):
        links.setdefault(article, []).append(link)
    lines = [json.dumps({"article": article, "links": found, "views": 3}) for article, found in links.items()]
    (tmp_path / "graph.jsonl").write_text("\n".join(lines))
    (tmp_path / "links.tsv").write_text(GRAPH.read_text() + "Cat\tCat\nCat\tMilk\n")
    (tmp_path / "articles.tsv").write_text("# titles\n\n" + "\n".join(links))
    tasks = taskset().select_tasks(10)
    for name in ("graph.jsonl", "links.tsv", "."):
        assert [task.uid for task in taskset(graph=str(tmp_path / name)).draw(10)] == [task.uid for task in tasks]


def test_encoded_titles_and_articles_without_links_are_read(tmp_path):
    (tmp_path / "links.tsv").write_text("%C3%81ed%C3%A1n_mac_Gabr%C3%A1in\tScotland\r\n")
    (tmp_path / "articles.tsv").write_text("Alone\nScotland\n")
    graph = LinkGraph.load(tmp_path)
    assert graph.titles == ["Alone", "Scotland", "Áedán mac Gabráin"]
    assert graph.links_of("Áedán mac Gabráin") == ["Scotland"]
    assert graph.links_of("Alone") == []
    assert graph.path("Scotland", "Alone") is None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("links.tsv", b"a\tb\na\tb\tc\n", "line 2: expected an article and a link"),
        ("links.tsv", b"a\t\n", "line 1: an article without a title"),
        ("links.tsv", b"# nothing\n", "has no links"),
        ("links.tsv", b"\xff\xfe\x00", "cannot be read"),
        ("graph.jsonl", b'{"article": "a", "links": ["b"]}\n{"article": "b", "lin', "line 2"),
        ("graph.jsonl", b'{"article": "a", "links": "b"}\n', "line 1"),
        ("graph.csv", b"a,b\n", "is not a graph file"),
    ],
)
def test_a_damaged_file_is_told_with_its_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        LinkGraph.load(tmp_path / name)
    with raises_code("config", "taskset.graph"):
        taskset(graph=str(tmp_path / name))


def test_a_missing_file_or_folder_is_told(tmp_path):
    for path in (tmp_path / "no.tsv", tmp_path):
        with pytest.raises(ConfigError):
            LinkGraph.load(path)


names = st.sampled_from("abcdefg")


@given(st.sets(st.tuples(names, names), min_size=1), names, names)
def test_paths_are_as_short_as_levels_say(edges, source, target):
    links: dict[str, set[str]] = {}
    for one, other in edges:
        links.setdefault(one, set()).add(other)
    graph = LinkGraph(links)
    if not {source, target} <= set(graph.titles):
        return
    levels = list(graph.levels(source))
    path = graph.path(source, target)
    distance = next((number for number, level in enumerate(levels) if target in level), None)
    assert (None if path is None else len(path) - 1) == distance
    assert sum(map(len, levels)) == len({title for level in levels for title in level})


def test_the_graph_of_a_config_is_found_beside_it(treetune, tmp_path):
    (tmp_path / "there").mkdir()
    shutil.copy(GRAPH, tmp_path / "there" / "here.tsv")
    (tmp_path / "there" / "walk.yaml").write_text(
        "taskset: {id: wikispeedia, graph: here.tsv}\nmodel: scripted:gold\nnum_tasks: 4\n"
    )
    result = treetune("eval", "there/walk.yaml", "--json")
    assert result.json["mean_reward"] == 1.0
    config = (tmp_path / result.json["run_dir"] / "config.yaml").read_text()
    assert str(tmp_path / "there" / "here.tsv") in config
