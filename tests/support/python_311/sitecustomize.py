"""SkyRL 0.3 gives pydantic a `typing.TypedDict`, which pydantic refuses before Python 3.12."""

import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict
