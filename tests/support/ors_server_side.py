"""An environment on the server of ors-sdk: ors_server_side.py PORT. Run with the Python of `venv(*OPENENV)`."""

import sys

from ors import Environment, Server, Split, TextBlock, ToolOutput, tool
from pydantic import BaseModel
from starlette.responses import JSONResponse
from starlette.routing import Route


class Answer(BaseModel):
    answer: str


class Word(BaseModel):
    word: str
    times: int = 1


class Sums(Environment):
    alive: set[int] = set()

    def setup(self):
        Sums.alive.add(id(self))

    def teardown(self):
        Sums.alive.discard(id(self))

    def get_prompt(self):
        return [TextBlock(text=f"What is {self.task_spec['a']} + {self.task_spec['b']}?")]

    @classmethod
    def list_splits(cls):
        return [Split(name="train", type="train"), Split(name="test", type="test")]

    @classmethod
    def list_tasks(cls, split):
        return [{"a": number, "b": 1 if split == "train" else 2} for number in range(4)]

    @tool
    def look(self, params: Word) -> ToolOutput:
        """Look at a word."""
        if params.word == "fail":
            raise RuntimeError("the machine is gone")
        return ToolOutput(blocks=[TextBlock(text=params.word * params.times)], reward=0.25)

    @tool
    def submit(self, params: Answer) -> ToolOutput:
        """Submit the answer."""
        right = params.answer.strip() == str(self.task_spec["a"] + self.task_spec["b"])
        return ToolOutput(blocks=[TextBlock(text="right" if right else "wrong")], reward=float(right), finished=True)


server = Server([Sums])
server.app.router.routes.insert(0, Route("/alive", lambda request: JSONResponse(len(Sums.alive))))
server.app.user_middleware = [one for one in server.app.user_middleware if "Redirect" not in one.cls.__name__]
server.run(host="127.0.0.1", port=int(sys.argv[1]))
