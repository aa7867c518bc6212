"""Messages and the tokens they become.

`message` is a chat message and its text, `images` the images in it, `calls` the calls of tools in it: one struct, one
reader, one writer. `call_formats` reads calls that a model writes into its text; `tool_template` gives tools to a chat
template, or writes them as text. `tokens` records what was sampled (`Tokens`) and makes prompts that continue it
(`ChatTokens`); `sampled_tokens` refuses ids and logprobs that cannot be right.
"""
