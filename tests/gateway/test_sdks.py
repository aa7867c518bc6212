"""The real SDKs of OpenAI and Anthropic, plain and streamed: one conversation is one sequence, exactly as sampled."""

from __future__ import annotations

import asyncio
import copy
import json

import openai
import pytest
from gateway_playing import BASH, check_exact, playing
from openai import AsyncOpenAI
from scripted_engine import make_tokenizer

plain_and_streamed = pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
BASH_OF_ANTHROPIC = {"name": "bash", "description": "Run.", "input_schema": BASH["function"]["parameters"]}
BASH_OF_RESPONSES = {"type": "function", "strict": False, **BASH["function"]}


def client_of(place, session, **options):
    return AsyncOpenAI(base_url=place.url(session) + "/v1", api_key=session.key, **options)


async def turn(client, messages, tools, stream):
    """One turn, as the SDK's own examples have it."""
    options = {"tools": tools} if tools else {}
    if stream:
        async with client.chat.completions.stream(model="m", messages=messages, **options) as events:
            async for _ in events:
                pass
            message = (await events.get_final_completion()).choices[0].message
    else:
        message = (await client.chat.completions.create(model="m", messages=messages, **options)).choices[0].message
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    for call in message.tool_calls or []:
        output = f"ok {json.loads(call.function.arguments)['command']}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    if not message.tool_calls:
        messages.append({"role": "user", "content": "Go on."})
    return message


def only_sequence(session):
    (sequence,) = session.tokens().sequences
    return sequence


@plain_and_streamed
def test_chat_completions(engine, stream):
    async def play():
        async with playing(engine) as place:
            session = place.gateway.open()
            messages = [{"role": "system", "content": "be good"}, {"role": "user", "content": "make out.txt"}]
            client = client_of(place, session)
            for _ in range(8):
                await turn(client, messages, [BASH], stream)
            assert [model.id async for model in client.models.list()] == ["model"]
            check_exact(engine, [only_sequence(session)], 8)
            assert any(message["role"] == "tool" for message in messages)

    asyncio.run(play())


@plain_and_streamed
def test_responses(engine, stream):
    async def play():
        async with playing(engine) as place:
            session = place.gateway.open()
            client = client_of(place, session)
            given = [{"role": "user", "content": "make out.txt"}]
            for _ in range(8):
                options = {"model": "m", "instructions": "be good", "input": given, "tools": [BASH_OF_RESPONSES]}
                if stream:
                    async with client.responses.stream(**options) as events:
                        async for _ in events:
                            pass
                        response = await events.get_final_response()
                else:
                    response = await client.responses.create(**options)
                assert response.status == "completed"
                given += [item.model_dump(exclude_none=True) for item in response.output]
                calls = [item for item in response.output if item.type == "function_call"]
                for call in calls:
                    given.append({"type": "function_call_output", "call_id": call.call_id, "output": call.arguments})
                if not calls:
                    given.append({"role": "user", "content": [{"type": "input_text", "text": "Go on."}]})
            check_exact(engine, [only_sequence(session)], 8)

    asyncio.run(play())


@plain_and_streamed
def test_messages(engine, stream):
    """As Claude Code uses them: cache marks move, texts become blocks and blocks texts, system messages are in the
    middle, and its billing line is new in each call."""
    anthropic = pytest.importorskip("anthropic")

    async def play():
        async with playing(engine) as place:
            session = place.gateway.open()
            client = anthropic.AsyncAnthropic(base_url=place.url(session), api_key=session.key)
            messages = [{"role": "user", "content": "make out.txt"}]
            for number in range(8):
                sent = copy.deepcopy(messages)
                if isinstance(sent[-1]["content"], str):
                    sent[-1]["content"] = [{"type": "text", "text": sent[-1]["content"]}]
                sent[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
                billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number:05};"}
                system = [billing, {"type": "text", "text": "be good", "cache_control": {"type": "ephemeral"}}]
                reminder = {"role": "system", "content": "Work in /tmp."}
                if number == 0:
                    reminder["content"] = [{**system[1], "text": reminder["content"]}]
                sent.insert(1, reminder)
                options = {"model": "m", "max_tokens": 500, "system": system, "messages": sent}
                options["tools"] = [BASH_OF_ANTHROPIC]
                if stream:
                    async with client.messages.stream(**options) as events:
                        message = await events.get_final_message()
                else:
                    message = await client.messages.create(**options)
                blocks = [block.model_dump(exclude_none=True) for block in message.content]
                messages.append({"role": "assistant", "content": blocks})
                uses = [block for block in message.content if block.type == "tool_use"]
                results = [{"type": "tool_result", "tool_use_id": use.id, "content": str(use.input)} for use in uses]
                messages.append({"role": "user", "content": results or "Go on."})
            counted = await client.messages.count_tokens(
                model="m", messages=messages, tools=[BASH_OF_ANTHROPIC], system="be good"
            )
            sequence = only_sequence(session)
            assert counted.input_tokens > len(sequence.ids)
            check_exact(engine, [sequence], 8)

    asyncio.run(play())


@plain_and_streamed
def test_completions(engine, stream):
    async def play():
        script = {"answer": ["\nI look. Observation:", "\nI am done."]}
        async with playing(engine, "plain", script=script) as place:
            session = place.gateway.open()
            client = client_of(place, session)
            text = "Question: how many?"
            for _ in range(2):
                options = {"model": "m", "prompt": text, "max_tokens": 100, "stop": ["Observation:"]}
                if stream:
                    parts = await client.completions.create(**options, stream=True)
                    said = "".join([part.choices[0].text async for part in parts if part.choices])
                else:
                    said = (await client.completions.create(**options)).choices[0].text
                assert "Observation" not in said
                text += f"{said}Observation: three files\n"
            check_exact(engine, session.tokens().sequences, 2)

    asyncio.run(play())


@plain_and_streamed
def test_reasoning_is_in_its_own_field(engine, stream):
    anthropic = pytest.importorskip("anthropic")

    async def play():
        script = {"answer": "<think>\nLet me see.\n</think>\n\nIt is 4."}
        async with playing(engine, script=script) as place:
            session = place.gateway.open()
            client, messages = client_of(place, session), [{"role": "user", "content": "2 + 2?"}]
            if stream:
                parts = await client.chat.completions.create(model="m", messages=messages, stream=True)
                deltas = [part.choices[0].delta async for part in parts]
                thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
                content = "".join(delta.content or "" for delta in deltas)
            else:
                message = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
                thought, content = message.reasoning_content, message.content
            assert thought.strip() == "Let me see."
            assert content.strip() == "It is 4."
            response = await client.responses.create(model="m", input="2 + 2?")
            assert [item.type for item in response.output] == ["reasoning", "message"]
            other = anthropic.AsyncAnthropic(base_url=place.url(session), api_key=session.key)
            said = await other.messages.create(model="m", max_tokens=500, messages=messages)
            assert [block.type for block in said.content] == ["thinking", "text"]

    asyncio.run(play())


def test_an_answer_that_is_cut_off_in_a_call_is_delivered_and_trained(engine):
    """The stream helper of the SDK raises an error of its own then, as with any server."""

    async def play():
        call = '<tool_call>\n{"name": "bash", "arguments": {"command": "' + "long " * 50
        async with playing(engine, script={"answer": [call, f" {call}"]}) as place:
            session = place.gateway.open()
            client, messages = client_of(place, session), [{"role": "user", "content": "hi"}]
            options = {"model": "m", "messages": messages, "tools": [BASH], "max_tokens": 60}
            with pytest.raises(openai.LengthFinishReasonError):
                async with client.chat.completions.stream(**options) as events:
                    await events.get_final_completion()
            whole = await client.chat.completions.create(**options)
            assert whole.choices[0].finish_reason == "length"
            assert f" {call}".startswith(whole.choices[0].message.content)
            check_exact(engine, session.tokens().sequences, 2)

    asyncio.run(play())


@plain_and_streamed
def test_googles_api(engine, stream):
    """Over plain HTTP, with the fields in both spellings of its SDKs. The model sees the text of an `output`."""
    import aiohttp

    async def play():
        async with playing(engine) as place, aiohttp.ClientSession() as http:
            session = place.gateway.open()
            verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
            contents = [{"role": "user", "parts": [{"text": "make out.txt"}]}]
            declaration = {"name": "bash", "description": "Run.", "parameters": {"type": "OBJECT", "properties": {
                "command": {"type": "STRING"}}}}  # fmt: skip
            for _ in range(8):
                body = {
                    "contents": contents,
                    "systemInstruction": {"parts": [{"text": "be good"}]},
                    "tools": [{"function_declarations": [declaration]}],
                    "generationConfig": {"maxOutputTokens": 500},
                }
                headers = {"x-goog-api-key": session.key}
                url = f"{place.base}/v1beta/models/gemini-x:{verb}"
                async with http.post(url, json=body, headers=headers) as response:
                    text = await response.text()
                    assert response.status == 200, text
                lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
                wholes = [json.loads(line) for line in lines] if stream else [json.loads(text)]
                assert wholes[-1]["candidates"][0]["finishReason"] == "STOP"
                parts = [part for whole in wholes for part in whole["candidates"][0]["content"]["parts"]]
                said = "".join(part.get("text", "") for part in parts if not part.get("thought"))
                calls = [part for part in parts if "functionCall" in part]
                contents.append({"role": "model", "parts": [*([{"text": said}] if said else []), *calls]})
                results = [
                    {"functionResponse": {"name": call["functionCall"]["name"], "response": {"output": "ok"}}}
                    for call in calls
                ]
                contents.append({"role": "user", "parts": results or [{"text": "Go on."}]})
            check_exact(engine, [only_sequence(session)], 8)
            last = make_tokenizer("calls:hermes").decode(engine.memory()["begun"][-1]["prompt"])
            assert "<start>tool\nok<end>" in last
            counted = {"contents": contents}
            async with http.post(f"{place.base}/v1beta/models/x:countTokens", json=counted, headers=headers) as found:
                assert (await found.json())["totalTokens"] > 50

    asyncio.run(play())
