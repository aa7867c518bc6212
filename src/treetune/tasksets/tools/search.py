"""The tool `search`: the best passages of a file of documents, by BM25.

tools: [{search: {corpus: docs.jsonl, documents: 5}}]

The file has one JSON object per line, `{"contents": ...}` or `{"title": ..., "text": ...}`. A config or
TREETUNE_SEARCH_CORPUS names it, never a row.
"""

from __future__ import annotations

import os
from pathlib import Path

from treetune.core.task import Task
from treetune.core.tool import Tool, ToolSource, tool
from treetune.errors import UsageError
from treetune.system.threads import call
from treetune.tasksets.search import CORPUS_VARIABLE, DOCUMENTS, Index, load_index


class SearchTool(ToolSource):
    """The best passages of a file of documents, by BM25."""

    _index: Index

    def __init__(self, task: Task, corpus: str | None = None, documents: int = DOCUMENTS) -> None:
        super().__init__(task)
        named = corpus or os.environ.get(CORPUS_VARIABLE)
        if not named:
            remedy = f"write {{search: {{corpus: FILE.jsonl}}}} in the config, or export {CORPUS_VARIABLE}=FILE.jsonl"
            raise UsageError("the tool search has nothing to search", remedy=remedy)
        if not isinstance(documents, int) or documents < 1:
            raise UsageError(f"the tool search shows at least 1 document, got {documents!r}")
        self._corpus, self._documents = Path(named), documents

    async def open(self) -> list[Tool]:
        self._index = await call(load_index, self._corpus)
        return await super().open()

    @tool
    def search(self, query: str) -> str:
        """Search the documents and get the best passages.

        query: words to look for.
        """
        found = self._index.search(query, self._documents)
        listing = [f"Doc {number}: {text.strip()}" for number, text in enumerate(found, 1)]
        return "\n".join(listing) or "nothing found: try other words"
