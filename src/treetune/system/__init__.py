"""What Treetune needs of the machine, and nothing about tasks.

- `threads`: user code beside the event loop (`call`), and a loop for code that is not async (`run_in_background`)
- `processes`: processes that can be killed (`WorkerPool`), pools of processes (`spawn_context`)
- `time_limit`: seconds that load on the machine does not change (`TimeLimit`, `CLOCK_FACTOR`)
- `ray_cluster`: the Ray cluster to work on (`join_cluster`)
- `folders`: the package, its version, the cache folder, `write_atomically`
- `hub`: models and datasets of the Hugging Face hub
- `http_body`: replies within bounds (`read_body`)
- `digest`: hashes of values
- `screen`: the terminal (`Screen`)
"""
