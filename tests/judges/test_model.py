"""Asking the model behind a judge: what is paid, how often, and who waits."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from judge_endpoint import serving
from scripted_judges import named

from treetune.core.policy import Sampling
from treetune.models import EndpointConfig
from treetune.scorers.judges import Judge, JudgeModel
from treetune.scorers.judges.model import ask, client_of
from treetune.scorers.judges.question import Question

pytestmark = pytest.mark.usefixtures("verdict_cache")


def question(answer: str = "Paris") -> Question:
    return Question.of("grade", "Right?", {"answer": answer}, {"grade": ("I", "C")})


def judge_at(url: str, **keys) -> JudgeModel:
    return JudgeModel(model="judge", endpoint=EndpointConfig(base_url=url, **keys.pop("endpoint", {})), **keys)


def test_a_judge_behind_an_endpoint_is_asked_with_its_own_sampling_and_key(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret-of-the-judge")
    with serving("Fair") as served:
        judge = judge_at(served.url, sampling=Sampling(temperature=0.3), endpoint={"api_key_env": "JUDGE_KEY"})
        asked = asyncio.run(ask(judge, question()))
        (request,) = served.answered
    assert asked.verdict == {"grade": "C"}
    assert request["headers"]["Authorization"] == "Bearer secret-of-the-judge"
    assert request["body"]["temperature"] == 0.3
    assert (asked.judgements[0].usage.prompt_tokens, asked.judgements[0].cached) == (100, False)


def test_a_verdict_is_paid_for_once_also_by_another_process(tmp_path):
    with serving("Fair") as served:
        judge = judge_at(served.url)
        first = asyncio.run(ask(judge, question()))
        again = asyncio.run(ask(judge, question()))
        code = (
            "import asyncio\n"
            "from treetune.scorers.judges import JudgeModel\nfrom treetune.scorers.judges.model import ask\n"
            "from treetune.scorers.judges.question import Question\nfrom treetune.models import EndpointConfig\n"
            "question = Question.of('grade', 'Right?', {'answer': 'Paris'}, {'grade': ('I', 'C')})\n"
            f"judge = JudgeModel(model='judge', endpoint=EndpointConfig(base_url={served.url!r}))\n"
            "print(asyncio.run(ask(judge, question)).judgements[0].cached)\n"
        )
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert len(served.answered) == 1
    assert [one.judgements[0].cached for one in (first, again)] == [False, True]
    assert (first.verdict, other.stdout) == (again.verdict, "True\n")
    assert other.stderr == ""  # what it opened is closed


def test_another_judge_another_sampling_or_another_prompt_is_asked_anew(tmp_path):
    with serving("Fair") as served:
        for judge in (judge_at(served.url), judge_at(served.url, sampling=Sampling(temperature=1.0))):
            asyncio.run(ask(judge, question()))
        asyncio.run(ask(JudgeModel(model="other", endpoint=EndpointConfig(base_url=served.url)), question()))
        asyncio.run(ask(judge_at(served.url), question("Rome")))
        assert len(served.answered) == 4


def test_the_same_question_from_many_callers_and_loops_is_asked_once(tmp_path):
    with serving("Fair", most=0) as served:
        judge = judge_at(served.url)
        found = []

        async def ask_often():
            return await asyncio.gather(*(ask(judge, question()) for _ in range(5)))

        threads = [threading.Thread(target=lambda: found.extend(asyncio.run(ask_often()))) for _ in range(3)]
        for thread in threads:
            thread.start()
        served.most = 9
        for thread in threads:
            thread.join()
        assert len(served.answered) == 1
    assert len(found) == 15
    assert sum(not asked.judgements[0].cached for asked in found) == 1  # one has paid


def test_no_more_calls_than_allowed_are_under_way(tmp_path):
    file = tmp_path / "counting.py"
    file.write_text(
        "import asyncio, re\n"
        "class Counting:\n"
        "    now = most = 0\n"
        "    async def complete(self, request):\n"
        "        cls = type(self)\n"
        "        cls.now += 1\n"
        "        cls.most = max(cls.most, cls.now)\n"
        "        await asyncio.sleep(0.01)\n"
        "        cls.now -= 1\n"
        "        code = re.search('VERDICT (\\\\w+)', request.messages[0]['content'])[1]\n"
        "        return f'VERDICT {code}: C'\n"
    )
    judge = JudgeModel(model=f"scripted:{file}:Counting", max_concurrent=3)

    async def ask_all():
        return await asyncio.gather(*(ask(judge, question(str(number))) for number in range(12)))

    assert all(asked.verdict == {"grade": "C"} for asked in asyncio.run(ask_all()))
    from named_code import load_object

    assert load_object(f"{file}:Counting").most == 3


def test_a_question_that_nobody_waits_for_any_more_is_not_begun(tmp_path):
    with serving("Fair", most=0) as served:
        judge = judge_at(served.url, max_concurrent=1)

        async def give_up():
            first = asyncio.ensure_future(ask(judge, question("one")))
            second = asyncio.ensure_future(ask(judge, question("two")))
            await asyncio.sleep(0.1)
            second.cancel()
            served.most = 9
            await first
            with pytest.raises(asyncio.CancelledError):
                await second

        asyncio.run(give_up())
        assert ["one" in prompt for prompt in served.prompts()] == [True]


def test_an_unreadable_verdict_is_not_kept(verdict_cache: Path):
    asked = asyncio.run(ask(JudgeModel(model=named("Refuses")), question()))
    assert asked.verdict is None
    assert not list(verdict_cache.rglob("*.json"))


def test_a_damaged_verdict_on_disk_is_asked_for_again(verdict_cache: Path):
    judge = JudgeModel(model=named("Fair"))
    asyncio.run(ask(judge, question()))
    (kept,) = verdict_cache.rglob("verdicts/*/*.json")
    kept.write_bytes(b"{")
    assert asyncio.run(ask(judge, question())).judgements[0].cached is False


def test_a_changed_script_gives_new_verdicts(tmp_path):
    file = tmp_path / "mine.py"
    text = (
        "import re\nclass Mine:\n    def complete(self, request):\n"
        "        return 'VERDICT ' + re.search('VERDICT (\\\\w+)', request.messages[0]['content'])[1] + ': C'\n"
    )
    file.write_text(text)
    before = JudgeModel(model=f"scripted:{file}:Mine").identity()
    file.write_text(text.replace(": C", ": I"))
    assert JudgeModel(model=f"scripted:{file}:Mine").identity() != before


def test_a_forked_process_has_its_own_clients():
    judge = JudgeModel(model=named("Fair"))
    asyncio.run(ask(judge, question()))

    async def find():
        return client_of(judge)

    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(asyncio.run(ask(judge, question("Rome"))).verdict != {"grade": "I"})
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert asyncio.run(find()) is not None


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("", "a judge needs either model"),
        ("local:/no/such/model", "no model at"),
        ("scripted:gild", "did you mean 'gold'"),
        ("scripted:nowhere.py:Judge", "no such file"),
        ("Qwen/Qwen3-8B", "give its address: scorer.endpoint.base_url URL"),
    ],
)
def test_a_judge_that_cannot_be_is_refused_before_anything_is_asked(model, says, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with pytest.raises(Exception, match=says):
        Judge(model=model).check()
