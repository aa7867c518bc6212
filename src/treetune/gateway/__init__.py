"""The model gateway: agents that were not written for Treetune call it like any model server; it records every token.

    gateway = Gateway(tokenizer, sampler)
    server = GatewayServer(gateway, "127.0.0.1:0", token="...")
    url = await server.start()
    session = gateway.open()                # the agent's base address: {url}/sessions/{session.key}/v1
    session.tokens()                        # `Tokens` for a trainer

`server` receives requests, `dialects/` reads and writes them, `session` is one rollout of an agent, `pieces` the tree
of its tokens, `prompts` writes calls as tokens, `streaming` passes on text while it is sampled, and `upstream` and
`local_model` sample. `agent` describes a program that plays tasks behind it, `programs` runs it, here or on a
machine, and `player` is the policy that does.
"""

from treetune.gateway.agent import AgentConfig, PythonAgent, known_agents, read_agent
from treetune.gateway.call import Sampled, Sampler
from treetune.gateway.client import is_gateway, list_sessions
from treetune.gateway.gateway import Gateway
from treetune.gateway.pieces import SessionSequence
from treetune.gateway.player import AgentClient, AgentPolicy
from treetune.gateway.prompts import Prompts, TokenModel
from treetune.gateway.server import GatewayServer
from treetune.gateway.session import Session, SessionLimits, SessionTrace
from treetune.gateway.upstream import HttpSampler

__all__ = [
    "AgentClient",
    "AgentConfig",
    "AgentPolicy",
    "Gateway",
    "GatewayServer",
    "HttpSampler",
    "Prompts",
    "PythonAgent",
    "Sampled",
    "Sampler",
    "Session",
    "SessionLimits",
    "SessionSequence",
    "SessionTrace",
    "TokenModel",
    "is_gateway",
    "known_agents",
    "list_sessions",
    "read_agent",
]
