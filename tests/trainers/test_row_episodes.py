"""Episodes of rows: here and on task servers they earn what eval gives, and a failure is not a reward."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tool_shop
from http_playing import playing
from raising import raises_code
from task_servers import scripted

from treetune.core.tool import message_of_action
from treetune.data.rows.formats import FORMATS
from treetune.data.rows.reading import read_rows
from treetune.data.rows.scorer import ScoredBy
from treetune.data.rows.writing import write_file
from treetune.serve import Misused, ServeError
from treetune.tasksets.target import load_taskset
from treetune.trainers.episodes import EpisodeSettings, RowEpisodes, share_episodes

COUNTING = """
from pathlib import Path
from treetune import Environment, Step, Task, Taskset


class Countdown(Environment):
    MULTI_TURN = True

    def note(self, word):
        with Path(self.task.extra_info["log"]).open("a") as log:
            log.write(word + " ")
        return Path(self.task.extra_info["log"]).read_text().split().count(word)

    def start(self):
        if self.note("start") <= self.task.extra_info["fails"]:
            raise RuntimeError("no machine")
        self.left = int(self.task.ground_truth)
        return self.task.messages

    def step(self, action):
        self.left -= 1
        right = action.text == str(self.left)
        return Step("go on", reward=0.5 * right, done=not right or self.left == 0)

    def close(self):
        self.note("close")


class Counting(Taskset):
    def load_tasks(self):
        for number in range(1, 6):
            extra = {"log": str(Path("log").absolute()), "fails": max(0, number - 3)}
            yield Task(prompt=f"Count from {number}.", env_class="counting.py:Countdown", extra_info=extra,
                       reward_spec={"ground_truth": number}, tools=["calculator"] if number == 2 else [])
"""


@pytest.fixture
def counting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    Path("counting.py").write_text(COUNTING)
    return load_taskset("counting.py:Counting")


def rows_of(taskset):
    """The scorer and the task of each row of a taskset, as a trainer reads them."""
    write_file(taskset.draw(None), "rows.parquet", "verl", scorer=taskset)
    rows = read_rows("rows.parquet")
    return [
        (ScoredBy.read(row["extra_info"]["scorer"]), FORMATS["verl"].task_of_pruned(row, whole=False)) for row in rows
    ]


async def play(episode, *actions):
    async with episode:
        return [await episode.step(action) for action in actions]


def outcome(steps):
    return [(step.reward, step.done) for step in steps]


def log():
    return Path("log").read_text().split()


ON = (0.5, False)
OVER = (0.5, True)


def test_a_row_is_played_here_by_what_it_names(counting):
    scorer, task = rows_of(counting)[2]

    async def main():
        episode = await RowEpisodes().start(scorer, task)
        assert episode.observation.messages() == [{"role": "user", "content": "Count from 3."}]
        assert (episode.info, episode.tools, episode.over) == ({"data_source": "Counting"}, [], False)
        return await play(episode, "2", "1", "0")

    assert outcome(asyncio.run(main())) == [ON, ON, OVER]
    assert log() == ["start", "close"]


def test_an_episode_that_nobody_ends_is_closed(counting):
    scorer, task = rows_of(counting)[2]

    async def main():
        entered = asyncio.Event()

        async def wait():
            async with await RowEpisodes().start(scorer, task):
                entered.set()
                await asyncio.sleep(60)

        waiting = asyncio.create_task(wait())
        await entered.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert log() == ["start", "close"]
        return await play(await RowEpisodes().start(scorer, task), "2")

    assert outcome(asyncio.run(main())) == [ON]
    assert log() == ["start", "close"] * 2


def test_the_tools_that_a_row_names_are_offered_and_called(counting):
    scorer, task = rows_of(counting)[1]

    async def main():
        episode = await RowEpisodes().start(scorer, task)
        assert [tool["function"]["name"] for tool in episode.tools] == ["calculator"]
        call = message_of_action({"tool": "calculator", "arguments": {"expression": "1 + 2"}})
        return await play(episode, call, "1", "0")

    first, *others = asyncio.run(main())
    assert [message["content"] for message in first.observation.messages()] == ["3"]
    assert outcome(others) == [ON, OVER]


def test_a_start_that_fails_is_tried_again_once(counting):
    rows = rows_of(counting)

    async def main():
        steps = await play(await RowEpisodes().start(*rows[3]), "3")
        Path("log").unlink()
        with pytest.raises(ServeError, match="RuntimeError: no machine"):
            await RowEpisodes().start(*rows[4])
        assert log() == ["start", "close"] * 2
        Path("log").unlink()
        return steps, await play(await RowEpisodes(attempts=3).start(*rows[4]), "4")

    assert [outcome(steps) for steps in asyncio.run(main())] == [[ON], [ON]]


def test_a_server_is_asked_for_the_task_of_the_row_wherever_it_stands(counting):
    shuffled = load_taskset("counting.py:Counting", {"shuffle.seed": "3"})
    rows = rows_of(counting)

    async def main():
        async with playing(shuffled) as server, RowEpisodes(EpisodeSettings(urls=(server.http.address,))) as episodes:
            played = [await play(await episodes.start(*rows[number]), str(number), "0") for number in (1, 1)]
            left = await episodes.start(*rows[2])
            assert left.observation.messages() == [{"role": "user", "content": "Count from 3."}]
            async with left:
                assert len(server.http.live) == 1
            return played, len(server.http.live)

    played, live = asyncio.run(main())
    assert [outcome(steps) for steps in played] == [[ON, OVER]] * 2
    assert live == 0


def test_a_server_of_other_tasks_is_refused(counting, tmp_path):
    rows = rows_of(counting)
    (tmp_path / "shop").mkdir()
    other = load_taskset(tool_shop.write(tmp_path / "shop"))

    async def main():
        async with playing(other) as server, RowEpisodes(EpisodeSettings(urls=(server.http.address,))) as episodes:
            with pytest.raises(Misused, match="there is no task with the uid"):
                await episodes.start(*rows[0])
            assert not server.http.live
        async with scripted() as plain, RowEpisodes(EpisodeSettings(urls=(plain.url,))) as episodes:
            with pytest.raises(Misused, match="cannot look up the task of a row"):
                await episodes.start(*rows[0])
            assert plain.seen["start"] == 0

    asyncio.run(main())


def test_a_server_that_is_gone_is_an_error_and_no_reward(counting):
    rows = rows_of(counting)

    async def main():
        async with RowEpisodes(EpisodeSettings(urls=("http://127.0.0.1:9",), patience=0.1)) as episodes:
            with pytest.raises(ServeError):
                await episodes.start(*rows[0])

    asyncio.run(main())


def test_episodes_are_shared_within_an_event_loop():
    async def main():
        loop = asyncio.get_running_loop()
        one, other = (
            share_episodes(loop, EpisodeSettings(urls=("http://127.0.0.1:9",), timeout=5), attempts=2) for _ in range(2)
        )
        return one, other, share_episodes(loop, EpisodeSettings(), attempts=2)

    one, other, here = asyncio.run(main())
    assert one is other
    assert here is not one
    assert asyncio.run(main())[0] is not one


def test_attempts_are_at_least_one():
    with raises_code("usage", "attempts"):
        RowEpisodes(attempts=0)
