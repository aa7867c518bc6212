"""Images in an evaluation: what an endpoint gets, what a run keeps, what is shown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import task_servers
from kinds import write_targets
from pictures import COLOURS, RED, png

from treetune import Environment, Observation, Run, Step, Task, Taskset, run_rollout
from treetune.chat.images import image_part, to_url, urls_in
from treetune.core.policy import Completion
from treetune.runs.folder import TRACES
from treetune.runs.plain_files import bring_back, move_out
from treetune.serve import EnvServer, HttpConfig, HttpDoor, TaskServerClient
from treetune.tasksets.target import load_taskset

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def endpoint(tmp_path):
    """Its address, and where it writes what it gets."""
    port, record = task_servers.free_port(), tmp_path / "requests.jsonl"
    url = f"http://127.0.0.1:{port}"
    with task_servers.process(str(SUPPORT / "colour_endpoint.py"), str(port), str(record), url=url, path="/"):
        yield f"{url}/v1", record


def test_an_endpoint_sees_each_image_and_a_run_keeps_it_once(treetune, tmp_path, endpoint):
    write_targets(tmp_path)
    url, record = endpoint
    model = ["-m", "any", "--endpoint.base_url", url, "-r", "3", "-o", "run", "--json"]
    result = treetune("eval", "colours.yaml", *model)
    assert result.json["mean_reward"] == 1.0, result.out
    sent = [json.loads(line)["messages"] for line in record.read_text().splitlines()]
    assert len(sent) == 9
    assert {urls_in(messages)[0] for messages in sent} == {to_url(png(colour)) for colour in COLOURS.values()}
    assert len(list((tmp_path / "run" / "images").iterdir())) == 3
    assert "base64" not in (tmp_path / "run" / "traces.jsonl").read_text()
    for trace in TRACES.read(tmp_path / "run"):
        (shown,) = urls_in(trace.task.messages)
        assert urls_in(trace.turns[0].observed) == [shown]
        assert trace.task.uid == trace.uid
    again = treetune("eval", "colours.yaml", *model, "--resume")
    assert again.json["rollouts"] == 9
    assert len(record.read_text().splitlines()) == 9  # it was whole: nobody was asked again
    scored = treetune("eval", "colours.yaml", *model, "--resume", "--rescore")
    assert scored.json["mean_reward"] == 1.0, scored.err
    scored = treetune("rescore", "run", "-o", "new", "--json")
    assert scored.json["after"]["mean_reward"] == 1.0, (scored.out, scored.err)
    for run in ("run", "new"):
        assert all("base64" in urls_in(trace.task.messages)[0] for trace in TRACES.read(tmp_path / run))


def test_a_record_is_what_it_was_and_strangers_bring_nothing_in(tmp_path):
    url = to_url(png(RED))
    line = json.dumps({"a": url, "b": [url], "c": f'quoted "{url}"', "d": "data:image/png;base64,A"}).encode()
    moved = move_out(line, tmp_path)
    assert moved.count(b"base64") == 2
    assert bring_back(moved, tmp_path) == line
    (tmp_path / "secret.png").write_bytes(b"secret")
    for name in ("../secret.png", "secret.png", f"{'0' * 32}.png"):
        assert bring_back(b'"images/%s"' % name.encode(), tmp_path) == b'"images/%s"' % name.encode()


def test_show_names_images_and_prints_none(treetune, tmp_path):
    write_targets(tmp_path)
    result = treetune("show", "colours.yaml", "-n", "1")
    assert "[image: png 8 x 6, 75 bytes, " in result.out
    assert "base64" not in result.out


def test_no_screen_shows_the_bytes_of_an_image_wherever_it_lies(treetune, tmp_path):
    (tmp_path / "seen.py").write_text(
        "from treetune import Task, Taskset\n"
        f"URL = {to_url(png(COLOURS['red']))!r}\n"
        "PART = {'type': 'image_url', 'image_url': {'url': URL}}\n"
        "class Seen(Taskset):\n"
        "    def load_tasks(self):\n"
        "        yield Task(prompt=[{'role': 'user', 'content': [PART]}], extra_info={'shots': [{'url': URL}]})\n"
        "    def reward(self, task, answer): return 1.0\n"
        "    def gold(self, task): return [URL]\n"
    )
    for arguments in (("show", "seen.py:Seen"), ("eval", "seen.py:Seen", "-m", "scripted:echo", "--dry-run")):
        shown = treetune(*arguments).out
        assert "[image: png 8 x 6, 75 bytes, " in shown
        assert "base64" not in shown
    assert treetune("eval", "seen.py:Seen", "-m", "scripted:echo", "-o", "run").code == 0
    for more in ((), ("--rollout", "0/0")):
        assert "base64" not in treetune("show", "run", *more).out
    assert "base64" not in repr(Run(tmp_path / "run").trace("0/0").task)


class Gallery(Environment):
    """Two pictures, one after the other."""

    MULTI_TURN = True

    def start(self):
        return Observation("image", to_url(png(COLOURS["red"])))

    def step(self, action):
        first = not hasattr(self, "seen")
        self.seen = True
        shown = [
            {"role": "user", "content": [{"type": "text", "text": "And?"}, image_part(to_url(png(COLOURS["blue"])))]}
        ]
        right = action.text == ("red" if first else "blue")
        return Step(shown if first else "", reward=right / 2, done=not first)


class Galleries(Taskset):
    def load_tasks(self):
        return [Task()]

    def environment(self, task):
        return Gallery(task)


def test_an_environment_may_show_images_in_every_turn():
    class Seer:
        name = "seer"

        async def complete(self, request):
            last = urls_in(request.messages)[-1]
            return Completion(next(name for name, colour in COLOURS.items() if to_url(png(colour)) == last))

    trace = asyncio.run(run_rollout(Galleries(), Galleries()[0], Seer()))
    assert trace.reward == 1.0
    assert len(urls_in(trace.messages)) == 2


def test_the_door_of_episodes_gives_the_parts(tmp_path, monkeypatch):
    write_targets(tmp_path)
    monkeypatch.chdir(tmp_path)

    async def start():
        http = HttpDoor(HttpConfig(address="127.0.0.1:0"))
        server = EnvServer(load_taskset("colours.yaml"), doors=[http])
        await server.start()
        try:
            async with TaskServerClient(http.address) as client, await client.start(0) as episode:
                return episode.observation.messages()
        finally:
            await server.close()

    assert urls_in(asyncio.run(start())) == [to_url(png(RED))]
