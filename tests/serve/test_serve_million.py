"""A million tasks through a pool of four while rollouts run: the sequence of `task_at`, in flat memory."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from pathlib import Path

import pytest
import zmq
from serve_process import resident, serve
from serving import Numbers

from treetune.serve.messages import pack, pack_head, unpack_plain
from treetune.serve.zmq.client import EnvClient

pytestmark = pytest.mark.slow

SAMPLES = int(os.environ.get("TREETUNE_TEST_SAMPLES", 1_000_000))
UNDER_WAY = 128
HEAD = pack_head(b"0123456789abcdef")


def test_a_million_samples_are_the_sequence_of_task_at(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    options = ["serving:Numbers", "--zmq", "tcp://127.0.0.1:0", "-w", "4", "-m", "scripted:gold", "--state", "kept"]
    with serve(tmp_path, *options, PYTHONPATH=path) as server:
        rollouts = asyncio.run(both(server))
        told = server.stop()
    assert rollouts > 100
    assert f"the next index is {SAMPLES}" in told


async def both(server):
    """Pulls in a thread, and runs rollouts of a stream of their own meanwhile."""
    pulling = asyncio.create_task(asyncio.to_thread(pull, server))
    done = 0
    async with EnvClient(server.address, taskset=Numbers()) as client:

        async def roll():
            nonlocal done
            while not pulling.done():
                trace = await client.run_rollout(await client.sample(stream="rollouts"))
                assert trace.reward == 1.0
                done += 1
                await asyncio.sleep(0.02)

        await asyncio.gather(*(roll() for _ in range(4)))
    await pulling
    return done


def pull(server):
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(server.address)
    here, received, early = Numbers(), 0, None
    waiting: deque[bytes] = deque()
    sent = 0
    ack: list[bytes] = []
    while received < SAMPLES:
        while sent < SAMPLES and len(waiting) < UNDER_WAY:
            id = sent.to_bytes(8, "big")
            socket.send_multipart([id, b"sample", HEAD, pack({"ack": ack})])
            waiting.append(id)
            ack = []
            sent += 1
        assert socket.poll(60_000)
        id, data = socket.recv_multipart()
        answer = unpack_plain(data)
        assert id == waiting.popleft(), "one client's draws come in order"
        assert answer["index"] == received
        task, expected = answer["task"], here.task_at(received)
        assert (task["idx"], task["prompt"]) == (received, expected.prompt)
        assert task["reward_spec"] == expected.reward_spec
        ack.append(id)
        received += 1
        if received == SAMPLES // 5:
            early = resident(server.process.pid)
    late = resident(server.process.pid)
    socket.close()
    assert early is not None
    assert late < early + 40, f"memory grew from {early:.0f} to {late:.0f} MB"
