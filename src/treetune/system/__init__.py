"""What Treetune needs of the machine, and nothing about tasks.

Threads for user code (`threads`), processes that can be killed (`worker_process`, `spawned_process`), the Ray cluster
(`ray_cluster`), the cache folder (`cache_folder`), models of the hub (`hub`), replies within bounds (`http_body`),
hashes of values (`digest`), the terminal (`screen`), the package itself (`package`).
"""
