"""Makes `src/treetune/serve/http/openapi.json` of the structs that the HTTP door reads and answers.

After a change of `treetune.serve.http.wire`: python tests/support/openapi.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from treetune.serve.http import wire
from treetune.serve.http.wire import (
    CancelAnswer,
    CancelBody,
    HealthAnswer,
    InfoAnswer,
    StartAnswer,
    StartBatchAnswer,
    StartBatchBody,
    StartBody,
    StepAnswer,
    StepBatchAnswer,
    StepBatchBody,
    StepBody,
)
from treetune.system.http_error import ErrorAnswer

FILE = Path(wire.__file__).with_name("openapi.json")

_CODES = {
    401: "No token, or a wrong one.",
    403: "Asked by a web page from elsewhere.",
    404: "No such episode; no task with that uid.",
    409: "A turn that is not the next, and whose answer is not kept any more; a `request_id` that another start has.",
    410: "The episode is over: finished, cancelled, expired, failed, or lost with its worker.",
    413: "The body is too large.",
    422: "The body is wrong; `path` says where.",
    429: "As many episodes as may live; `Retry-After` says when to ask again.",
    500: "The environment failed; the episode is over.",
    503: "The server is stopping, or its workers cannot be started; `Retry-After` says when to ask again.",
    504: "The environment took longer than its limit; the episode is over.",
}
_TAKES_BODY = [401, 403, 413, 422]
_OPERATIONS: list[tuple[str, str, type | None, type, list[int]]] = [
    (
        "/api/episode/start",
        "Begin an episode.",
        StartBody,
        StartAnswer,
        [*_TAKES_BODY, 404, 409, 410, 429, 500, 503, 504],
    ),
    ("/api/episode/step", "Do an action.", StepBody, StepAnswer, [*_TAKES_BODY, 404, 409, 410, 500, 504]),
    ("/api/episode/cancel", "End an episode.", CancelBody, CancelAnswer, [*_TAKES_BODY, 404, 410]),
    ("/api/episode/start_batch", "Begin several.", StartBatchBody, StartBatchAnswer, _TAKES_BODY),
    ("/api/episode/step_batch", "Do an action in each of several.", StepBatchBody, StepBatchAnswer, _TAKES_BODY),
    ("/api/task/info", "What is served.", None, InfoAnswer, [401, 403]),
    ("/api/health", "Whether it is ready.", None, HealthAnswer, [403, 503]),
]
"""Path, what it does, what is posted there (None: it is a GET), the answer, and further statuses."""


def describe_api() -> dict[str, Any]:
    """The server as OpenAPI 3.1; whether a token is needed is what each server says itself."""
    kinds = [kind for _, _, body, answer, _ in _OPERATIONS for kind in (body, answer) if kind] + [ErrorAnswer]
    references, components = msgspec.json.schema_components(
        kinds, schema_hook=lambda kind: {}, ref_template="#/components/schemas/{name}"
    )
    # What the structs refuse themselves.
    components["StepBody"]["anyOf"] = [{"required": ["action"]}, {"required": ["tool_calls"]}]
    typed = {"required": ["type", "content"]}
    components["ActionBody"]["anyOf"] = [typed, {"required": ["role"]}, {"required": ["tool_calls"]}]
    contents = {kind: {"application/json": {"schema": found}} for kind, found in zip(kinds, references, strict=True)}
    operations: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, summary, body, answer, codes in _OPERATIONS:
        name = path.rpartition("/")[2]
        responses: dict[str, Any] = {"200": {"description": "As asked.", "content": contents[answer]}}
        for code in sorted(codes):
            responses[str(code)] = {"description": _CODES[code], "content": contents[ErrorAnswer]}
            if code in (429, 503):
                responses[str(code)]["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
        operations[name] = {"operationId": name, "summary": summary, "responses": responses}
        if body is not None:
            operations[name]["requestBody"] = {"required": body is not StartBody, "content": contents[body]}
        paths[path] = {"get" if body is None else "post": operations[name]}
    operations["health"]["security"] = []
    begun = {"episode_id": "$response.body#/episode_id"}
    operations["start"]["responses"]["200"]["links"] = {
        "step": {"operationId": "step", "requestBody": {**begun, "turn": 0}, "description": "Do an action in it."},
        "cancel": {"operationId": "cancel", "requestBody": begun, "description": "End it."},
    }
    # Where it is asked for with `Accept: text/event-stream`.
    operations["step"]["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Treetune task server", "version": "1", "summary": "Episodes of a taskset, over HTTP."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(describe_api(), indent=1) + "\n")
