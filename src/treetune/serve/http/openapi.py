"""The HTTP episode server as OpenAPI 3.1, made from the structs of `wire.py`.

    curl http://127.0.0.1:5000/openapi.json

So the description cannot differ from what the server takes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from treetune.serve.http import wire

_CODES = {
    401: "No token, or a wrong one.",
    403: "Asked by a web page from elsewhere.",
    404: "No such episode.",
    409: "A turn that is not the next, and whose answer is not kept any more.",
    410: "The episode is over: finished, cancelled, expired, failed, or lost with its worker.",
    413: "The body is too large.",
    422: "The body is wrong; `path` says where.",
    429: "As many episodes as may live; `Retry-After` says when to ask again.",
    500: "The environment failed; the episode is over.",
    503: "The server is stopping, or its workers cannot be started; `Retry-After` says when to ask again.",
    504: "The environment took longer than its limit; the episode is over.",
}
_COMMON = [401, 403, 413, 422]
_POSTS: dict[str, tuple[str, type, type, list[int]]] = {
    "start": ("Begin an episode.", wire.StartBody, wire.StartAnswer, [410, 429, 500, 503, 504]),
    "step": ("Do an action.", wire.StepBody, wire.StepAnswer, [404, 409, 410, 500, 504]),
    "cancel": ("End an episode.", wire.CancelBody, wire.CancelAnswer, [404, 410]),
    "start_batch": ("Begin several.", wire.StartBatchBody, wire.StartBatchAnswer, []),
    "step_batch": ("Do an action in each of several.", wire.StepBatchBody, wire.StepBatchAnswer, []),
}
_GETS: dict[str, tuple[str, type, list[int]]] = {
    "/api/task/info": ("What is served.", wire.InfoAnswer, [401, 403]),
    "/api/health": ("Whether it is ready.", wire.HealthAnswer, [403, 503]),
}
_LINKS = {
    name: {
        "operationId": name,
        "description": f"What was begun: {what}.",
        "requestBody": {"episode_id": "$response.body#/episode_id", **more},
    }
    for name, what, more in [("step", "do an action in it", {"turn": 0}), ("cancel", "end it", {})]
}


@cache
def openapi(needs_token: bool = False) -> bytes:
    bodies = [body for _, body, _, _ in _POSTS.values()]
    answers = [answer for _, _, answer, _ in _POSTS.values()] + [answer for _, answer, _ in _GETS.values()]
    kinds = [*bodies, *answers, wire.ErrorAnswer]
    references, components = msgspec.json.schema_components(
        kinds, schema_hook=lambda kind: {}, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(kinds, references, strict=True))

    def describe(name: str, summary: str, answer: type, codes: list[int], **body: Any) -> dict[str, Any]:
        responses = _describe_responses(schemas[answer], sorted(codes), schemas[wire.ErrorAnswer])
        return {"operationId": name, "summary": summary, **body, "responses": responses}

    paths: dict[str, Any] = {}
    for name, (summary, body, answer, codes) in _POSTS.items():
        taken = {"required": body is not wire.StartBody, "content": _json(schemas[body])}
        post = describe(name, summary, answer, _COMMON + codes, requestBody=taken)
        paths[f"/api/episode/{name}"] = {"post": post}
    for path, (summary, answer, codes) in _GETS.items():
        paths[path] = {"get": describe(path.rpartition("/")[2], summary, answer, codes)}
    paths["/api/health"]["get"]["security"] = []
    paths["/api/episode/start"]["post"]["responses"]["200"]["links"] = _LINKS
    # Where it is asked for with `Accept: text/event-stream`.
    step = paths["/api/episode/step"]["post"]["responses"]["200"]
    step["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "Treetune task server", "version": "1", "summary": "Episodes of a taskset, over HTTP."},
        "security": [{"token": []}] if needs_token else [],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(whole)


def _describe_responses(good: Any, codes: list[int], error: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"200": {"description": "As asked.", "content": _json(good)}}
    for code in codes:
        found[str(code)] = {"description": _CODES[code], "content": _json(error)}
        if code in (429, 503):
            found[str(code)]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return found


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
