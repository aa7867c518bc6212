"""What Treetune needs from the operating system and the network; nothing about tasks.

- `threads`: running user code off the event loop (`call`), and a loop for synchronous code (`run_in_background`)
- `processes`: processes that can be killed (`ProgramPool`), process pools (`spawn_context`), and joining a Ray cluster
  (`join_cluster`)
- `time_limit`: time limits that do not depend on the machine's load (`TimeLimit`, `CLOCK_FACTOR`)
- `folders`: the package folder, its version, the cache folder, `write_atomically`
- `hub`: models and datasets on the Hugging Face hub
- `http_body`: reading HTTP replies up to a size limit (`read_body`)
- `http_listener`, `http_app`, `http_error`: serving HTTP (`HttpListener`, `JsonApp`, `HttpError`)
- `access`: who may use a server (`Access`); `process_limits`: memory and descriptors that all connections share
- `digest`: hashes of values
- `screen`: the terminal (`Screen`)
"""
