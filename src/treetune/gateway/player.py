"""An `AgentPolicy` has an agent play tasks, behind a gateway that records its calls of the model.

    policy = AgentPolicy("codex", load_policy("local:model", taskset))
    trace = await run_rollout(taskset, task, policy)
    trace.agent.calls, trace.tokens

A trainer has no policy: it gives each episode what samples (`play_behind`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from treetune.chat.message import Message
from treetune.chat.tokens import ChatTokens
from treetune.core.agent import Agent, AgentMachine, AgentRun, Assignment
from treetune.core.policy import Completion, Policy, Request, Sampling, Usage
from treetune.errors import PolicyError, UsageError, format_error
from treetune.gateway.agent import AgentConfig, PythonAgent, read_agent
from treetune.gateway.call import Answerer, Call
from treetune.gateway.dialects import chat
from treetune.gateway.gateway import Gateway
from treetune.gateway.programs import SOCKET, SOCKETS, ProgramEnded, run_here, run_on_machine
from treetune.gateway.prompts import Prompts, TokenModel
from treetune.gateway.server import GatewayServer, list_variables
from treetune.gateway.session import Session
from treetune.gateway.upstream import HttpSampler
from treetune.sandbox.limits import SandboxLimits
from treetune.sandbox.machines import HOST


class AgentPolicy(Agent):
    def __init__(
        self, agent: str | Mapping[str, Any] | AgentConfig | PythonAgent, policy: Policy | None = None
    ) -> None:
        """The `policy` answers the calls of the agent. Tokens are recorded if it is a local model, or one of vLLM."""
        self.agent = agent if isinstance(agent, AgentConfig | PythonAgent) else read_agent(agent)
        self.name = policy.name if policy is not None else self.agent.name
        self._policy, self._model = policy, None if policy is None else _token_model(policy, self.agent.tokenizer)
        self._folder = tempfile.TemporaryDirectory(prefix="treetune-gateway-")
        Path(self._folder.name).chmod(0o711)  # a machine's user may pass, and must know the name
        self.gateway = Gateway(name="policy")
        self._server = GatewayServer(
            self.gateway, token=secrets.token_urlsafe(24), unix=f"{self._folder.name}/{SOCKET}"
        )
        self._starting: asyncio.Future[str] | None = None
        if isinstance(self.agent, AgentConfig):
            needs = self.agent.needs()
            self.needs = replace(needs, shown=((self._folder.name, SOCKETS), *needs.shown))

    async def play(self, assignment: Assignment) -> AgentRun:
        assert self._policy is not None, "an agent without a policy plays behind a sampler"
        return await self.play_behind(self._model or _Answers(self._policy, assignment), assignment)

    async def play_behind(self, behind: TokenModel | Answerer, assignment: Assignment) -> AgentRun:
        """Have the agent play. `behind` answers its calls."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._server.start())
        url = await asyncio.shield(self._starting)
        agent, limits = self.agent, self.agent.limits
        if assignment.machine is not None and (most := assignment.machine.seconds) is not None:
            limits = replace(limits, seconds=min(limits.seconds, max(most, 0.001)))
        how: dict[str, Any] = {"behind": behind, "records": True, "weights": assignment.weights}
        session = self.gateway.open(limits, assignment.sampling, **how)
        try:
            if isinstance(agent, PythonAgent):
                ended = await _call(agent, assignment, AgentClient(session, url))
            else:
                ended = await self._run(agent, assignment, url, session)
        finally:
            self.gateway.drop(session)
        if session.failed:
            raise PolicyError(f"the model failed to answer the agent: {', '.join(sorted(session.failures))}")
        return self._read(ended, session, assignment.machine is not None)

    async def _run(self, agent: AgentConfig, assignment: Assignment, url: str, session: Session) -> ProgramEnded:
        given = partial(list_variables, key=session.key)
        seconds, machine = session.limits.seconds, assignment.machine
        if agent.sandbox == "none" or (agent.sandbox is None and machine is None):
            return await run_here(agent, assignment.problem, url, given, seconds)
        if machine is not None:
            return await run_on_machine(agent, assignment.problem, machine, given, seconds)
        sizes = {name: getattr(self.needs, name) for name in ("memory_mb", "processes", "disk_mb")}
        async with await HOST.open(SandboxLimits(**sizes, shown=self.needs.shown)) as shell:
            own = AgentMachine(shell, python=HOST.python)
            return await run_on_machine(agent, assignment.problem, own, given, seconds)

    def _read(self, ended: ProgramEnded, session: Session, on_machine: bool) -> AgentRun:
        warnings = []
        if ended.timed_out:
            warnings.append(f"the agent was ended after {session.limits.seconds:g} seconds")
        elif ended.code:
            warnings.append(": ".join(filter(None, [f"the agent ended with exit code {ended.code}", ended.errors])))
        if not session.counts["calls"]:
            warnings.append("the agent did not call the model")
        record, tokens = session.record(self.agent.name)
        record.on_machine = on_machine
        return AgentRun(
            answer=ended.answer,
            record=record,
            tokens=tokens,
            usage=Usage(session.counts["prompt_tokens"], session.counts["completion_tokens"]),
            warnings=warnings,
            truncated=ended.timed_out or session.spent,
            forfeit="the agent took more memory than its machine has" if ended.out_of_memory else None,
        )

    async def close(self) -> None:
        if self._starting is not None:
            await self._starting
            await self._server.close()
        self._folder.cleanup()
        if self._model is not None and isinstance(self._model.sampler, HttpSampler):
            self._model.sampler.close()
        if self._policy is not None:
            await self._policy.close()


class AgentClient:
    """The model, for an agent in Python. SDKs reach it at `base_url` with `api_key`."""

    def __init__(self, session: Session, url: str) -> None:
        variables = list_variables(url, session.key)
        self.base_url, self.api_key = variables["OPENAI_BASE_URL"], variables["OPENAI_API_KEY"]
        self._session = session

    async def chat(self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **fields: Any) -> Message:
        """Ask the model, and return its message. `fields` are those of OpenAI's chat completions."""
        call = chat.read({"messages": messages, "tools": tools, **fields})
        digest = os.urandom(16)
        return self._session.deliver(await self._session.ask(call, digest), digest).message


async def _call(agent: PythonAgent, assignment: Assignment, client: AgentClient) -> ProgramEnded:
    """Call an agent in Python. An exception is a crash of the agent, and no failure of the rollout."""
    try:
        async with asyncio.timeout(client._session.limits.seconds):
            answer = await agent.play(assignment, client)
    except TimeoutError:
        return ProgramEnded("", 1, timed_out=True)
    except Exception as error:
        return ProgramEnded("", 1, format_error(error))
    if not isinstance(answer, str):
        raise UsageError(f"{agent.name} returned a {type(answer).__name__}", remedy="return the answer as text")
    return ProgramEnded(answer, 0)


def _token_model(policy: Policy, tokenizer: str | None) -> TokenModel | None:
    """The tokens of a policy's model; None if it works on messages."""
    from treetune.data.rows.prompt_lengths import load_tokenizer
    from treetune.models.local import LocalPolicy
    from treetune.models.openai import OpenAIPolicy
    from treetune.models.vllm import PREFIX, VllmPolicy

    if isinstance(policy, LocalPolicy):
        from treetune.gateway.local_model import LocalSampler

        return TokenModel(Prompts(ChatTokens(policy.tokenizer, rewrites="keep")), LocalSampler(policy))
    if isinstance(policy, VllmPolicy):
        tokenizer = tokenizer or policy.name.removeprefix(PREFIX)
    if tokenizer is None or not isinstance(policy, OpenAIPolicy):
        return None
    endpoint, chat = policy.endpoint, ChatTokens(load_tokenizer(tokenizer), rewrites="keep")
    sampler = HttpSampler(endpoint.base_url, policy.called, api_key=endpoint.api_key(), seconds=endpoint.timeout)
    return TokenModel(Prompts(chat), sampler)


class _Answers:
    """Answers the calls of one rollout's agent with a policy that works on messages. Their tokens are unknown."""

    def __init__(self, policy: Policy, assignment: Assignment) -> None:
        self._policy, self._given = policy, assignment

    async def __call__(self, call: Call, sampling: Sampling, number: int) -> Completion:
        given = self._given
        if given.weights is not None and given.weights.paused:
            await given.weights.wait()
        return await self._policy.complete(
            Request(
                messages=call.messages, sampling=sampling, task=given.task, turn=number, key=given.key, tools=call.tools
            )
        )
