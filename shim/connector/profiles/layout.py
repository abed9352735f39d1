"""How many block ids a hand-off must hold for a prompt, by KV cache group.

The worker pairs its own blocks with the last ones of the peer's (nixl/base_worker.py
`_apply_prefix_caching`, moriio `_align_read_blocks`): too few end in an assertion that takes the engine
along, too many shift the KV by a block without a word. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

SLACK = 64
"""Ids a list may hold past one a prompt token: prefill may have generated some tokens of its own."""


class GroupKind(Enum):
    """What a KV cache group's blocks stand for."""

    FULL = "full"  # every token of the sequence
    WINDOW = "window"  # the tokens of a sliding window
    STATE = "state"  # a recurrent state (Mamba)
    OTHER = "other"  # something that no rule is known for


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group that is transferred.

    Attributes:
        kind: what its blocks stand for.
        block_size: tokens a block holds on this server.
        window_blocks: most blocks of a `WINDOW` group in a hand-off.
    """

    kind: GroupKind
    block_size: int
    window_blocks: int = 0


def layout(kv_cache_config: Any, block_size: int) -> tuple[Group, ...] | None:
    """The groups of a vLLM `KVCacheConfig` that are transferred, `None` if there is nothing to read.

    Args:
        kv_cache_config: vLLM's, read by attribute and class name; 0.28 has no `transfer_groups`
            (the branch can go with 0.28's support).
        block_size: tokens a block of the *scheduler's* holds (with context parallelism that is
            `cache_config.block_size` times its sizes).
    """
    groups = getattr(kv_cache_config, "transfer_groups", None)
    if groups is None:
        groups = getattr(kv_cache_config, "kv_cache_groups", None)
    return None if groups is None else tuple(_group(group.kv_cache_spec, block_size) for group in groups)


def _group(spec: Any, block_size: int) -> Group:
    names = {cls.__name__ for cls in type(spec).__mro__}
    if "MambaSpec" in names:
        return Group(GroupKind.STATE, block_size)
    if "SlidingWindowSpec" in names:
        own = int(spec.block_size)
        # As nixl/base_scheduler.py `blocks_per_sw`: one more for a window that straddles blocks.
        return Group(GroupKind.WINDOW, own, _cdiv(int(spec.sliding_window), own) + 1)
    if names & {"FullAttentionSpec", "UniformTypeKVCacheSpecs"}:
        return Group(GroupKind.FULL, block_size)
    return Group(GroupKind.OTHER, block_size)


def counts_problem(
    blocks: Sequence[Sequence[int]],
    groups: Sequence[Group] | None,
    *,
    prompt_tokens: int,
    backoff: int,
    remote_tokens: int | None,
) -> str:
    """Why these blocks don't fit the prompt; `""` if they do, or if it can't be told.

    Args:
        blocks: the peer's block ids by group, already known to be lists.
        groups: this server's groups, `None` if not known.
        prompt_tokens: the prompt's length here.
        backoff: trailing prompt tokens that prefill leaves out on purpose (hybrid models; else 0).
        remote_tokens: tokens that the peer says it holds, `None` if it does not say.
    """
    needed = prompt_tokens - backoff if prompt_tokens > backoff else prompt_tokens
    # The last token is computed here in any case, so a peer that lacks just that one is as good.
    if remote_tokens is not None and remote_tokens < prompt_tokens - max(backoff, 1):
        return f"prefill holds {remote_tokens} tokens, this prompt has {prompt_tokens}"
    if not any(blocks):
        return "prefill holds no blocks"
    if groups is None:
        return ""
    for ids, group in zip(blocks, groups, strict=True):
        problem = _group_problem(len(ids), group, needed, remote_tokens, groups)
        if problem:
            return problem
    return ""


def _group_problem(
    count: int, group: Group, needed: int, remote_tokens: int | None, groups: Sequence[Group]
) -> str:
    size, kind = group.block_size, group.kind
    wanted = _cdiv(needed, size)
    held = None if remote_tokens is None else _cdiv(remote_tokens, size)
    if kind is GroupKind.WINDOW:
        wanted = min(wanted, group.window_blocks)
        held = None if held is None else min(held, group.window_blocks)
    elif kind is not GroupKind.FULL:
        return "" if count else "prefill holds no state"
    if count == wanted and (held is None or held == count):
        return ""
    if count and any(other.kind is GroupKind.STATE for other in groups):
        # Hybrid models size their blocks by their state, so peers of another parallel size have others.
        size_low, size_high = _sizes(needed, count)
        if remote_tokens is not None:
            low, high = _sizes(remote_tokens, count)
            size_low, size_high = max(size_low, low), min(size_high, high)
        return "" if size_low <= size_high else _misfit(count, wanted)
    if count < wanted or kind is GroupKind.WINDOW:
        return _misfit(count, wanted) if count < wanted or held == count else ""
    # More blocks than here: smaller ones, whose size divides ours (TransferTopology.block_size_ratio)?
    tokens = needed if remote_tokens is None else remote_tokens
    low, high = _sizes(tokens, count)
    fits = any(
        size % other == 0 and _cdiv(needed, other) == count for other in range(low, min(high, size - 1) + 1)
    )
    return "" if fits else _misfit(count, wanted)


def _sizes(tokens: int, count: int) -> tuple[int, int]:
    """The block sizes for which `tokens` take exactly `count` blocks; empty if low > high."""
    if count <= 1:
        return max(tokens, 1), 2**31
    return _cdiv(tokens, count), _cdiv(tokens, count - 1) - 1


def _misfit(count: int, wanted: int) -> str:
    return f"{count} remote blocks for a prompt of {wanted}"


def _cdiv(tokens: int, size: int) -> int:
    return -(-tokens // size)
