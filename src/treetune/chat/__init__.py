"""Chat messages and their tokens.

`message` is a chat message and its text, `images` the images in it, `calls` its tool calls, with one struct, one reader
and one writer. `call_formats` parses calls that a model writes into its text; `tool_template` passes tools to a chat
template, or writes them as text. `tokens` records what was sampled (`Tokens`) and makes prompts that continue it
(`ChatTokens`); `sampled_tokens` rejects invalid ids and logprobs.
"""
