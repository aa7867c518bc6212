"""What the trace of a session says: which sequences there are, of which agent, and what was not recorded."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from gateway_playing import BASH, check_exact, playing
from openai import AsyncOpenAI
from scripted_engine import make_tokenizer
from test_sdks import turn

from treetune.gateway import Gateway, GatewayServer, Sampled


@contextlib.asynccontextmanager
async def talking(engine, tokenizer="calls:hermes", model=None, **options):
    async with playing(engine, tokenizer, **options) as place:
        session = place.gateway.open(model=model)
        yield session, AsyncOpenAI(base_url=place.url(session) + "/v1", api_key="any", max_retries=0)


def conversation(text, system="You work."):
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


async def turns(client, messages, number, tools=(BASH,)):
    for at in range(number):
        await turn(client, messages, list(tools), at % 2 == 1)


def kinds_of(session):
    return [sequence.kind for sequence in session.trace().sequences]


def text_of(session, at, tokenizer="calls:hermes"):
    return make_tokenizer(tokenizer).decode(session.trace().sequences[at].tokens.ids)


def test_the_main_agent_is_last_and_a_title_is_not_the_task(engine):
    """A title for the session is asked for under the main model's name; trainers with one row take the last."""

    async def play():
        async with talking(engine) as (session, client):
            await turns(client, conversation("hi", "Name this session."), 1, tools=())
            await turns(client, conversation("work"), 3)
            await turns(client, conversation("help", "You help."), 2)
            assert kinds_of(session) == ["side", "sub-agent", "main"]
            assert "work" in text_of(session, -1)
            assert session.trace().sequences[-1].calls == [1, 2, 3]
            check_exact(engine, session.tokens().sequences, 5)
            check_exact(engine, [each.tokens for each in session.trace().sequences], 6)

    asyncio.run(play())


def test_calls_of_another_model_are_side_calls_if_the_session_names_its_model(engine):
    async def play():
        async with talking(engine, model="m") as (session, client):
            await turns(client, conversation("work"), 2)
            await client.chat.completions.create(model="small", messages=conversation("work"), tools=[BASH])
            assert kinds_of(session) == ["side", "main"]
            assert session.trace().sequences[0].model == "small"

    asyncio.run(play())


def test_parallel_workers_with_the_main_agents_prompt_are_sub_agents(engine):
    async def play():
        async with talking(engine) as (session, client):
            messages = conversation("work")
            await turns(client, messages, 1)
            await asyncio.gather(*(turns(client, conversation(f"part {at}"), 2) for at in range(2)))
            await turns(client, messages, 2)
            assert kinds_of(session) == ["sub-agent", "sub-agent", "main"]
            check_exact(engine, session.tokens().sequences, 7)

    asyncio.run(play())


def test_compaction_begins_anew_and_an_edit_names_where_it_comes_from(engine):
    async def play():
        async with talking(engine) as (session, client):
            messages = conversation("work")
            await turns(client, messages, 2)
            messages[1:] = [{"role": "user", "content": "Summary: half is done. Go on."}]
            await turns(client, messages, 4)
            assert kinds_of(session) == ["compaction", "main"]
            answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
            messages[answers[1]] = {"role": "assistant", "content": "I did not say this."}
            await turns(client, [*messages[: answers[1] + 1], {"role": "user", "content": "And now?"}], 1)
            sequences = session.trace().sequences
            # It shares the first answer, which is trained once; the fabricated message is given.
            assert [sequence.calls for sequence in sequences] == [[2, 3, 4, 5], [2, 6], [0, 1]]
            assert [sequence.trained for sequence in sequences] == [[2, 3, 4, 5], [6], [0, 1]]
            assert "I did not say this." in text_of(session, 1)
            check_exact(engine, [each.tokens for each in sequences], 7)

    asyncio.run(play())


def test_an_agent_that_changes_its_answers_has_a_sequence_for_each_step(engine):
    """As smolagents does, which appends to them: reported, not hidden."""

    async def play():
        async with talking(engine, "plain") as (session, client):
            messages = [{"role": "user", "content": "work"}]
            for _ in range(3):
                await turn(client, messages, [], False)
                messages[-2] = {**messages[-2], "content": messages[-2]["content"] + "<end_code>"}
            sequences = session.trace().sequences
            assert [sequence.calls for sequence in sequences] == [[0], [1], [2]]
            assert [sequence.origin for sequence in sequences] == [None, 0, 1]
            check_exact(engine, session.tokens().sequences, 3)

    asyncio.run(play())


@pytest.mark.parametrize(("rewrites", "count"), [("keep", 1), ("split", 4)])
def test_reasoning_that_no_sdk_sends_back_is_kept_or_split(engine, rewrites, count):
    async def play():
        answers = [f"<think>hm {at}</think>Answer {at}." for at in range(4)]
        async with talking(engine, "forgets_thoughts", rewrites=rewrites, script={"answer": answers}) as (
            session,
            client,
        ):
            messages = [{"role": "user", "content": "work"}]
            for at in range(4):
                await turn(client, messages, [], at % 2 == 1)
                messages[-2] = {"role": "assistant", "content": messages[-2]["content"]}
            assert not any("hm" in str(message) for message in messages)
            assert len(session.tokens().sequences) == count
            check_exact(engine, session.tokens().sequences, 4)

    asyncio.run(play())


def test_arguments_that_an_sdk_writes_anew_and_systems_in_the_middle_are_one_sequence(engine):
    async def play():
        call = '<tool_call>\n{"name":"bash","arguments":{"command":"ls","also":[1,2]}}\n</tool_call>'
        async with talking(engine, script={"answer": [call, "Done.", "Yes."]}) as (session, client):
            messages = conversation("work")
            await turn(client, messages, [BASH], True)
            function = messages[2]["tool_calls"][0]["function"]
            function["arguments"] = '{ "also": [1, 2],  "command": "ls" }'
            messages[2]["tool_calls"][0]["id"] = messages[3]["tool_call_id"] = "another-id"
            await turn(client, messages, [BASH], False)
            messages.insert(-1, {"role": "system", "content": "Be brief."})
            await turn(client, messages, [BASH], False)
            (sequence,) = session.trace().sequences
            assert sequence.calls == [0, 1, 2]
            check_exact(engine, [sequence.tokens], 3)

    asyncio.run(play())


def test_the_given_beginning_of_an_answer_is_not_trained(engine):
    anthropic = pytest.importorskip("anthropic")

    async def play():
        async with playing(engine, "plain", script={"answer": [" is 4.", "Yes."]}) as place:
            session = place.gateway.open()
            client = anthropic.AsyncAnthropic(base_url=place.url(session), api_key="any")
            messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "The answer"}]
            said = await client.messages.create(model="m", max_tokens=50, messages=messages)
            assert said.content[0].text == " is 4."
            messages[1]["content"] += said.content[0].text
            messages.append({"role": "user", "content": "Sure?"})
            await client.messages.create(model="m", max_tokens=50, messages=messages)
            (sequence,) = session.tokens().sequences
            check_exact(engine, [sequence], 2)

    asyncio.run(play())


def test_without_token_ids_the_trace_says_so_and_guesses_nothing(engine):
    async def play():
        async with talking(engine, script={"ids": False}) as (session, client):
            messages = conversation("work")
            await turns(client, messages, 3)
            assert len(messages) > 4, "the agent works all the same"
            trace = session.trace()
            assert trace.counts["without_ids"] == 3
            assert trace.sequences == []

    asyncio.run(play())


def test_the_version_of_the_weights_is_recorded_for_each_token(engine):
    async def play():
        async with talking(engine) as (session, client):
            await turns(client, conversation("work"), 1)
            (sequence,) = session.tokens().sequences
            assert sequence.versions == [7 if sampled else -1 for sampled in sequence.mask]

    asyncio.run(play())


def test_a_function_of_a_trainer_can_sample():
    async def play():
        tokenizer = make_tokenizer("plain")

        class Trainer:
            context = 4096

            async def __call__(self, prompt, sampling, hear):
                ids = tokenizer("I am the trainer's.<end>")["input_ids"]
                if hear is not None:
                    for token in ids:
                        hear(Sampled([token]))
                return Sampled(ids, [-0.5] * len(ids), versions=[3] * len(ids))

        gateway = Gateway(tokenizer, Trainer())
        server = GatewayServer(gateway, token="t")
        base = await server.start()
        session = gateway.open()
        client = AsyncOpenAI(base_url=f"{base}/v1", api_key=session.key)
        for stream in (False, True):
            messages = [{"role": "user", "content": f"hi {stream}"}]
            said = await turn(client, messages, [], stream)
            assert said.content == "I am the trainer's."
        await server.close()
        for sequence in session.tokens().sequences:
            assert sequence.logprobs == [-0.5 * sampled for sampled in sequence.mask]
            assert sequence.versions == [3 if sampled else -1 for sampled in sequence.mask]

    asyncio.run(play())
