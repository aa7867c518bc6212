"""A stand-in for slime's `Sample`: the fields, and how a response grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    def get_reward_value(self, args: Any) -> Any:
        return self.reward[args.reward_key] if args.reward_key else self.reward

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: list[int],
        log_probs: list[float] | None = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
    ) -> None:
        assert (log_probs is None) is not trainable or not tokens
        self.response += text or ""
        if tokens:
            self.loss_mask = [*(self.loss_mask or []), *[int(trainable)] * len(tokens)]
        if tokens or log_probs is not None:
            self.rollout_log_probs = [*(self.rollout_log_probs or []), *(log_probs or [0.0] * len(tokens))]
        self.tokens += tokens
        self.response_length += len(tokens)
        if meta_info is not None:
            self.weight_versions.append(meta_info["weight_version"])
            ends = {"length": "truncated", "abort": "aborted", "stop": "completed"}
            self.status = Sample.Status(ends[meta_info["finish_reason"]["type"]])
