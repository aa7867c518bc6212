"""The agent: OpenAI's SDK and two calls. Of Treetune it only gets a problem, an address and a key."""

from openai import AsyncOpenAI

sdk = AsyncOpenAI(base_url="http://unused", api_key="unused")
"""One for all tasks, for a new one takes 20 ms."""


async def solve(task, client):
    """Return the answer after a draft and a second look."""
    model = sdk.with_options(base_url=client.base_url, api_key=client.api_key)
    messages = [{"role": "user", "content": task.problem}]
    draft = await model.chat.completions.create(model="policy", messages=messages)
    messages += [draft.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Check it."}]
    checked = await model.chat.completions.create(model="policy", messages=messages)
    return checked.choices[0].message.content
