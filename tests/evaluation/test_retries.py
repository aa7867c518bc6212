"""Calls that had to be repeated are counted: in traces, in the summary, on screen."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

from treetune.runs.run import Run


@pytest.fixture
def busy():
    """The address of a server that is busy at every other call."""
    calls = count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            message = {"role": "assistant", "content": "VERDICT: yes"}
            data = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
            self.send_response(200 if next(calls) % 2 else 429)
            self.send_header("Retry-After", "0.001")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.parametrize("where", [[], ["--serve", 1]])
def test_retries_are_in_traces_in_the_summary_and_on_screen(treetune, tmp_path, busy, where):
    told = treetune("eval", "arithmetic", "-m", "m", "-n", 3, "-c", 1, "--endpoint.base_url", busy, "-o", "run", *where)
    run = Run(tmp_path / "run")
    assert [trace.retries for trace in run.traces()] == [1, 1, 1]
    assert run.summary.retries == 3
    assert "3 calls repeated" in told.out
    assert f"{busy}/chat/completions answered 429" in told.err  # at once: who waits should know why
    assert told.err.count("calls are repeated") == 1


JUDGED = """
from treetune import Task, Taskset
from treetune.scorers import judge

class Judged(Taskset):
    scorer = judge(model="j", retries=0, endpoint={"base_url": URL})

    def load_tasks(self):
        return [Task(prompt="Hello?", reward_spec={"ground_truth": "Hello."})]
"""


def test_retries_of_a_judge_are_its_own(treetune, tmp_path, busy):
    (tmp_path / "judged.py").write_text(JUDGED.replace("URL", repr(busy)))
    treetune("eval", "judged.py:Judged", "-m", "scripted:echo", "-o", "run")
    (trace,) = Run(tmp_path / "run").traces()
    # The verdict is unreadable, so that the judge is asked about a neutral answer too.
    assert (trace.retries, [judgement.retries for judgement in trace.judgements], trace.all_retries) == (0, [1, 1], 2)
