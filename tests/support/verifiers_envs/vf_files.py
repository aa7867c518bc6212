"""Say a number: its reward reads a file, so it needs the runtime."""

import verifiers.v1 as vf

__all__ = ["FilesTaskset"]


class Data(vf.TaskData):
    answer: str = ""


class Files(vf.Task[Data]):
    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("said.txt", (trace.last_reply or "").encode())

    @vf.reward(weight=1.0)
    async def written(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        said = (await runtime.read("said.txt")).decode()
        if said == "unreadable" or self.data.answer == "2":
            raise ValueError("cannot be read")
        return float(said == self.data.answer)


class FilesTaskset(vf.Taskset[Files, vf.TasksetConfig]):
    def load(self):
        for n in range(3):
            yield Files(Data(prompt=f"Say {n}.", answer=str(n)), self.config.task)
