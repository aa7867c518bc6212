"""The viewer in a real browser, on a run of 200 tasks by 8 rollouts with all that it shows."""

from __future__ import annotations

import json
import re
from random import Random
from urllib.parse import quote

import paid_turns
import pytest
from view_page import Page, view
from viewed_run import make_viewed_run, viewed_traces

from treetune.chat.message import text_of
from treetune.chat.tokens import Tokens
from treetune.core.trace import encode_trace

pytestmark = pytest.mark.slow


def write_verl(folder):
    """What verl leaves in its `rollout_data_dir`: a file for each step, a line for each rollout."""
    folder.mkdir(parents=True)
    for step in (1, 2, 3):
        lines = [
            {"input": f"What is {task} + 1?", "output": f"It is {task + right}.", "gts": str(task + 1), "score": right}
            for task in range(6)
            for right in (0.0, 1.0, 1.0, 1.0)
        ]
        text = "".join(json.dumps({**line, "step": step}) + "\n" for line in lines)
        (folder / f"{step}.jsonl").write_text(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view") / "runs"
    make_viewed_run(folder / "base")
    make_viewed_run(folder / "later", seed=1, shift=0.1, model="qwen-7b-step200")
    make_viewed_run(folder / "trained", seed=3, steps=20, tasks=40)
    write_verl(folder / "verl")
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with view(folder.name, folder=folder.parent) as address:
        yield address


@pytest.fixture
def page(browser, address):
    with Page(browser, address) as page:
        yield page
        assert page.complaints() == []


def row_of(page, number):
    """The texts of the cells of a group that is shown, and its other columns."""
    row = f'#groups [role=row][aria-rowindex="{number + 2}"]'
    page.waits(lambda: page.all(f"{row} .cell"), f"group {number}")
    return page.texts(f"{row} .cell"), {name: page.text(f"{row} .{name}") for name in ("task", "mean", "variance")}


# 1. Runs


def test_runs_are_a_table_that_sorts_and_filters(page):
    page.go("/", until="table.runs")
    page.waits(lambda: page.text("table.runs").count("±") == 4, "the means of the runs")
    assert {"base", "later", "trained", "verl"} == {each.split()[0] for each in page.texts("table.runs tbody th")}
    page.click("table.runs th button", "Mean reward")
    means = [float(each.split()[0]) for each in page.texts("table.runs .c-mean")]
    assert means == sorted(means, reverse=True)
    assert len(page.all("table.runs .spark polyline")) == 4
    page.type("input.filter", "step200")
    page.waits(lambda: len(page.all("table.runs tbody tr")) == 1, "one run")
    assert "filter=step200" in page.hash
    assert page.text("table.runs tbody") != ""


def test_a_run_has_tags(page, folder):
    page.go("/", until="table.runs")
    page.click("table.runs tbody tr:nth-child(1) .add")
    page.type(".tags input", "keep first\n")
    page.sees("table.runs .tags", "keep\nfirst|keep first")
    assert any("keep" in file.read_text() for file in folder.glob("*/tags.json"))
    page.click(".tag", "keep")
    page.waits(lambda: len(page.all("table.runs tbody tr")) == 1, "the run with the tag")


# 2. Run


def test_a_run_is_seen_in_one_look(page):
    page.go("/run/0", until=".timeline canvas")
    assert re.search(r"Mean reward\s+0\.5\d+ ± 0\.0\d+", page.text(".figures"))
    shown = page.text(".cards")
    for source in ("essays", "pictures", "sums", "tools", "walk"):
        assert source in shown
    assert "KeyError (start) at viewed_tasks.py:63" in shown
    assert "environment error" in shown
    assert "__proto__" in shown
    assert len(page.all(".u-over")) == 3  # rewards, by turns, by length
    assert "rollouts over" in page.one(".timeline canvas").get_attribute("aria-label")
    assert "all 0" in page.text(".stack")
    page.click(".stack a", "all 0")
    page.sees(".under", r"\d+ groups · \d+ rollouts fit")
    assert page.hash == "#/run/0/groups?q=all0"
    assert set(row_of(page, 0)[0]) <= {"0", "×"}


def test_a_bar_of_the_histogram_leads_to_its_rollouts(page):
    from selenium.webdriver import ActionChains

    page.go("/run/0", until=".u-over")
    chart = page.one(".u-over")
    ActionChains(page.browser).move_to_element_with_offset(chart, 8 - chart.size["width"] // 2, 0).click().perform()
    page.sees(".under", r"\d+ rollouts")
    assert "reward>=0 & reward<0.05" in page.hash.replace("+", " ")


def test_a_training_is_a_curve_over_its_steps(page, browser, folder):
    page.go("/run/2", until=".u-legend")
    assert "step" in page.text(".u-legend")
    assert "essays" in page.text(".u-legend")
    with view("trained", folder=folder) as address, Page(browser, address) as alone:
        alone.sees(".figures", "Mean reward")
        alone.go("/", until=".curve .u-over")
        alone.sees(".curve figcaption", "steps of the training")


# 3. Groups


def test_groups_are_rows_of_cells_by_variance(page):
    page.go("/run/0/groups", until="#groups .cell")
    page.sees(".under", "200 groups")
    cells, first = row_of(page, 0)
    assert len(cells) == 8
    assert first["variance"] == "0.25"
    assert len(page.all("#groups [role=row]")) < 60  # rows are recycled
    page.keep("view-groups")
    page.runs("document.querySelector('#groups .recycled').scrollTop = 1e9")
    cells, last = row_of(page, 199)
    assert last["variance"] in ("–", "0")
    page.click(".heads button", "Task")
    page.waits(lambda: row_of(page, 0)[1]["task"] == "0", "task 0 first")
    page.click(".heads button", "Task")
    page.waits(lambda: row_of(page, 0)[1]["task"] == "199", "task 199 first")
    assert "all failed" in page.go("/run/0/groups?q=allfailed", until=".flag.failed").text("#groups")


def test_cells_show_advantages_too(page):
    page.go("/run/0/groups?by=advantage", until="#groups .cell")
    page.waits(lambda: row_of(page, 0)[0][0] in (".5", "−.5"), "advantages")


def test_arrows_go_through_cells_and_on_through_rollouts(page):
    from selenium.webdriver import Keys

    page.go("/run/0/groups", until="#groups .cell")
    page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.waits(lambda: page.all("#cell-1-2.on"), "the third cell of the second row")
    assert page.one("#groups").get_attribute("aria-activedescendant") == "cell-1-2"
    _, second = row_of(page, 1)
    _, third = row_of(page, 2)
    page.press(Keys.ENTER)
    page.sees("h1#title", f"Task {second['task']} rollout 2")
    page.press(Keys.ARROW_RIGHT)
    page.sees("h1#title", f"Task {second['task']} rollout 3")
    page.press("j")
    page.sees("h1#title", f"Task {third['task']} rollout 3")
    page.press("k", "k")
    page.press(Keys.ESCAPE)
    page.waits(lambda: page.all("#groups .cell.on"), "the groups again")
    page.press(Keys.ARROW_DOWN)
    page.waits(lambda: page.all("#groups:focus"), "the focus where it was")


def test_the_next_group_shows_a_rollout_that_fits_the_query(page):
    page.go(f"/run/0/groups?q={quote('mixed & reward=1')}&sort=task", until="#groups .cell:not(.faint)")
    page.waits(lambda: page.all("#groups .cell.faint"), "rollouts that do not fit")
    tasks = [row_of(page, number)[1]["task"] for number in range(8)]
    page.one("#groups .cell:not(.faint)").click()
    for task in tasks:
        page.sees("h1#title", f"Task {task} ")
        page.sees(".rollout-head .line", r"\n1\n")
        page.press("j")


# 4. Rollout


def open_one(page, query, words=""):
    """The first rollout that a query finds."""
    page.go(f"/run/0/rollouts?q={quote(query)}", until=".rollout-row .c-task")
    page.waits(lambda: page.all("#rollouts a.rollout-row .c-answer"), query)
    page.one("#rollouts a.rollout-row").click()
    page.sees(".facts", words or "Time")


def test_a_rollout_shows_calls_of_tools_with_their_results(page):
    open_one(page, "source=tools & scored & turns>3 & mixed")
    call = page.text(".call")
    assert "calculator" in call
    assert "expression" in call
    assert "→" in call
    assert len(page.all(".turn")) > 2
    assert "turn 1 reward 0" in page.text(".turn-end").replace("\n", " ")
    assert "calls 1" in page.text(".turn-end .info").replace("\n", " ")
    assert page.texts(".message > header").count("tool") == 0  # a result is shown once, with its call
    page.keep("view-rollout")


def test_reasoning_is_folded_and_markdown_is_shown_on_request(page):
    open_one(page, 'source=sums & scored & rollout=1 & task>20 "The plan"')
    assert not page.one(".thought pre").is_displayed()
    page.click(".thought summary")
    assert "I add slowly" in page.text(".thought pre")
    page.press("m")
    page.sees(".markdown h2", "The plan")
    assert page.all(".markdown math mfrac")
    assert page.all(".markdown table td")
    assert "md=1" in page.hash


def test_answer_stands_beside_truth_with_why_judges_and_times(page):
    open_one(page, "source=sums & solved")
    assert "as the truth" in page.text(".answer")
    page.sees(".facts", r"Why.*Metrics.*Time.*policy.*environment.*scorer.*Again.*treetune eval.*treetune show")
    open_one(page, "source=essays & scored", "Judges")
    page.click(".judge summary")
    assert "VERDICT" in page.text(".judge")
    assert "Is this essay clear?" in page.text(".judge")


def test_pictures_are_shown(page):
    open_one(page, "source=pictures & scored")
    page.waits(lambda: page.runs("return document.querySelector('.picture img')?.naturalWidth") > 0, "picture")


def test_a_failure_shows_the_line_of_the_users_code(page):
    open_one(page, "failure~ZeroDivision")
    assert "viewed_tasks.py:41" in page.text(".failure")
    page.click(".failure summary")
    assert "Traceback" in page.text(".failure")


def test_the_environment_shows_a_rollout_its_own_way(page):
    open_one(page, "source=walk & solved")
    page.sees(".rendered pre", "@")
    assert "monospace" in page.runs("return getComputedStyle(document.querySelector('.rendered pre')).fontFamily")


def test_each_turn_shows_its_advantage_where_turns_are_credited(browser, tmp_path, monkeypatch):
    paid_turns.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    rollouts = [(1, [1.0, 0.0]), (1, [0.0, 1.0])]
    paid_turns.make_run(tmp_path / "runs" / "trained", "paid_turns_tasks.py:ByTurn", rollouts)
    with view("runs", folder=tmp_path) as address, Page(browser, address) as page:
        page.go("/run/0/at/1", until=".turn-end .badge")
        assert page.texts(".turn-end .badge") == ["advantage 0", "advantage +1"]


# 5. Tokens


def test_tokens_are_a_strip_of_sampled_and_given_ones(page):
    from selenium.webdriver import ActionChains

    page.go("/run/0/at/3/tokens", until=".tokens .token.sampled")
    counted = re.search(r"(\d+) tokens: (\d+) sampled, (\d+) given", page.text(".sequence header"))
    assert len(page.all(".tokens .token")) == int(counted[1])
    assert len(page.all(".tokens .token.sampled")) == int(counted[2])
    assert len(page.all(".tokens .token.given")) == int(counted[3])
    assert len({each.get_attribute("class") for each in page.all(".tokens .token.sampled")}) > 2  # shades
    ActionChains(page.browser).move_to_element(page.all(".tokens .token.sampled")[4]).perform()
    page.sees(".token-tip", r"id \d+ · sampled · logprob −\d.*probability.*place \d+")


def test_tokens_are_texts_where_a_tokenizer_is_named(browser, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    traces = [trace for trace in viewed_traces(40, 8) if trace.task.data_source == "tools" and trace.scored]
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([f"{text_of(m['content'])}\n<|user|>" for t in traces for m in t.messages], 1200)
    (tmp_path / "run").mkdir()
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    random = Random(0)
    for trace in traces:
        trace.tokens = Tokens()
        history = []
        for turn in trace.turns:
            for message in turn.observed:
                history += tokenizer.encode(f"<|{message['role']}|>\n{text_of(message['content'])}\n").ids
            history += tokenizer.encode("<|assistant|>\n").ids
            calls = json.dumps([call.arguments for call in turn.calls]) if turn.calls else ""
            said = tokenizer.encode(f"{text_of(turn.message['content'])}{calls}\n").ids
            logprobs = [-random.expovariate(1.5) * random.random() ** 3 for _ in said]
            trace.tokens.add_turn(history, said, logprobs)
            history = history + said
    (tmp_path / "run" / "traces.jsonl").write_bytes(b"".join(encode_trace(trace) + b"\n" for trace in traces))
    longest = max(range(len(traces)), key=lambda at: len(traces[at].turns))
    with view("run", "--tokenizer", "model", folder=tmp_path) as address, Page(browser, address) as page:
        page.go(f"/run/0/at/{longest}/tokens", until=".tokens .token.sampled")
        assert "I compute that." in "".join(page.texts(".tokens .token.sampled"))
        assert "What is" in "".join(page.texts(".tokens .token.given"))
        page.keep("view-tokens")
        assert page.complaints() == []


def read_sequences(folder):
    """The tokens of each rollout."""
    traces = map(json.loads, (folder / "base" / "traces.jsonl").read_bytes().splitlines())
    return [(each.get("tokens") or {}).get("sequences") or [] for each in traces]


def test_breaks_and_realigned_places_are_marked(page, folder):
    sequences = read_sequences(folder)
    broken = next(at for at, each in enumerate(sequences) if any(one["breaks_history"] for one in each))
    aligned = next(at for at, each in enumerate(sequences) if any(one["realigned"] for one in each))
    page.go(f"/run/0/at/{broken}/tokens", until=".break")
    assert len(page.all(".sequence")) == len(sequences[broken])
    page.go(f"/run/0/at/{aligned}/tokens")
    page.sees(".sequence header", "realigned")
    none = next(at for at, each in enumerate(sequences) if not each)
    page.go(f"/run/0/at/{none}/tokens")
    page.sees(".conversation", "has no tokens")


def test_of_a_long_sequence_only_what_is_near_are_elements(page, folder):
    lengths = [max([0, *(len(one["ids"]) for one in each)]) for each in read_sequences(folder)]
    at = lengths.index(max(lengths))
    assert lengths[at] > 1200
    page.resize(1400, 300)
    page.go(f"/run/0/at/{at}/tokens", until=".tokens .token.sampled")
    page.runs("document.getElementById('main').scrollTop = 1e6")
    page.waits(lambda: page.all(f".token[data-at='{lengths[at] - 1}']"), "the last token")
    page.runs("document.getElementById('main').scrollTop = 0")
    page.waits(lambda: not page.all(f".token[data-at='{lengths[at] - 1}']"), "the last token gone")


# 6. Compare


def test_two_runs_are_compared_by_task_with_answers_side_by_side(page):
    page.go("/", until="table.runs")
    for name in ("base", "later"):
        page.click(f"input[aria-label='Compare {name}']")
    page.click(".head button.main", "Compare 2 runs")
    page.sees(".verdict", r"\+0\.0\d+.*better")
    assert "± 0.0" in page.text(".compared table")
    counts = {each.split()[1]: int(each.split()[0]) for each in page.texts(".tasks .chip")}
    assert sum(counts.values()) == 200
    assert counts["fixed"] > counts["broken"] > 0
    page.click(".tasks .chip", "broken")
    page.sees(".pair h2", "broken")
    page.waits(lambda: len(page.all(".side pre")) == 2, "both answers")
    page.waits(lambda: page.all("mark.left") and page.all("mark.right"), "what differs")
    before = page.text(".pair h2")
    page.all(".tasks .recycled")[0].send_keys("j")
    page.waits(lambda: page.text(".pair h2") != before, "the next task")
    page.keep("view-compare")


def test_the_difference_of_two_texts_is_by_words(page):
    assert page.calls("diff.js", "diff('the cat sat', 'the dog sat')") == [
        ["same", "the "],
        ["left", "cat"],
        ["right", "dog"],
        ["same", " sat"],
    ]
    assert page.calls("diff.js", "diff('', 'new')") == [["right", "new"]]
    assert page.calls("diff.js", "diff('same', 'same')") == [["same", "same"]]


# 7. Find


def test_a_query_finds_completes_and_stands_in_the_address(page):
    from selenium.webdriver import Keys

    page.go("/run/0/groups", until="#groups .cell")
    page.press("/")
    page.press("sou")
    page.sees("#completion", "source=")
    page.press(Keys.ARROW_DOWN, Keys.ENTER)
    page.sees("#completion", "walk")
    page.press("wa", Keys.ARROW_DOWN, Keys.ENTER)
    page.sees(".under", "40 groups · 320 rollouts fit")
    page.press("& reward<0.5", Keys.ENTER)
    page.waits(lambda: "reward<0.5" in page.hash, "the query in the address")
    found = page.sees(".under", r"\d+ groups · (?!320)\d+ rollouts fit")
    assert page.all("#groups .cell.faint")  # those that do not fit stay, fainter
    page.browser.refresh()
    page.waits(lambda: page.text(".under") == found, "the same after a reload")
    page.type("input[aria-label=Query]", "nonsense=<3\n")
    page.sees(".wrong", "nonsense")
    assert all("422" in line for line in page.complaints())  # the browser's own note of the refused query
    page.click("button[aria-label='How to write a query']")
    assert "failure~timeout" in page.text(".examples")


def test_words_that_were_said_are_found(page):
    page.go('/run/0/rollouts?q="because it turns" %26 solved', until="#rollouts a.rollout-row")
    page.sees(".under", r"^\d+ rollouts")
    assert set(page.texts("#rollouts a .c-source")) == {"essays"}
    page.one("#rollouts a.rollout-row").click()
    page.waits(lambda: set(page.texts(".chat mark.hit")) == {"because it turns"}, "what was looked for, marked")
    first = page.text("h1#title")
    page.press("j")
    page.waits(lambda: page.text("h1#title") not in ("", first), "the next that was found")
    page.press("k")
    page.sees("h1#title", first)
    page.press("\ue00c")  # Escape
    page.sees(".under", r"^\d+ rollouts")


# 8. Suspicious


def test_what_is_suspicious_is_listed_by_rule(page):
    page.go("/run/0/suspicious", until=".suspect-row")
    page.click(".rule", "truncated-paid")
    page.waits(lambda: set(page.texts(".suspect-row .badge")) == {"truncated-paid"}, "one rule")
    page.click(".suspect-row")
    page.sees(".suspicion", "truncated-paid")


# 9. Do


def test_a_rollout_is_marked_and_commented(page, folder):
    page.go("/run/0/at/8", until=".mark textarea")
    page.press("2")
    page.sees(".mark .said", "Stored")
    page.type(".mark textarea", "look at the sign").send_keys("\t")
    page.waits(lambda: "look at the sign" in (folder / "base" / "marks.jsonl").read_text(), "the comment")
    page.go("/run/0/rollouts?q=mark%3Dbad")
    page.sees(".under", "^1 rollout$|^1 rollout\n|1 rollout")
    page.sees("#rollouts", "bad")


def test_the_command_that_plays_it_again_is_copied(page):
    page.go("/run/0/at/8", until=".command")
    page.runs("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    page.press("y")
    page.waits(lambda: "treetune" in (page.runs("return window.copied") or ""), "the command")


def test_what_is_selected_is_exported(page, tmp_path):
    page.browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.go("/run/0/rollouts?q=task<2", until="#rollouts a.rollout-row")
    page.sees(".under", "16 rollouts")
    page.click("select[aria-label^=Export] option", "JSON lines")
    page.waits(lambda: (tmp_path / "base-selected.jsonl").exists(), "the file")
    page.sees(".bar .said", "✓")
    assert len((tmp_path / "base-selected.jsonl").read_text().splitlines()) == 16


def test_scoring_again_is_a_preview(page, folder):
    before = (folder / "base" / "traces.jsonl").read_bytes()
    page.go("/run/0/rescore?q=task<4", until="button.main")
    page.click("button.main", "Score again")
    page.sees(".under", r"\d+ rollouts scored again: \d+ changed")
    page.click(".under input")
    page.waits(lambda: page.all(".rescore-row"), "rollouts with old and new")
    assert (folder / "base" / "traces.jsonl").read_bytes() == before


# 10. Foreign runs


def test_what_verl_has_written_is_shown_like_a_run_of_our_own(page):
    page.go("/", until="table.runs")
    page.sees("table.runs", "verl")
    page.click("table.runs th a", "verl")
    page.sees(".chart figcaption", "Mean reward over steps")
    page.press("g")
    page.sees(".under", r"\d+ groups")
    assert row_of(page, 0)[1]["mean"] == "0.75"
    page.click("#groups .cell")
    page.sees(".chat", r"What is \d \+ 1\?.*It is \d")
    page.sees(".answer", "Truth")
