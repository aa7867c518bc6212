"""Messages and the tokens they become.

`message` is a chat message, `normalize` the forms it may have, `images` the images in it. `tokens` records what was
sampled and continues prompts from it; `sampled_tokens` rejects ids and logprobs that cannot be right. `call_formats`,
`tool_template` and `text_tools` are the ways in which models write tool calls and read tools.
"""
