"""The stamp on a hand-off: by it decode can tell whether prefill's KV is its own prompt's.

Prefill puts it into the hand-off under `KEY`, decode takes it out before the connector looks. It can only
ever cause a local prefill, never trust. With `SHIM_STAMP_KEY` it is a keyed MAC; without, it guards
against mistakes, not attackers. Pure Python.

The stamp refuses only what proves another prompt. What one side lacks, or merely calls by another name,
loads as it would without the shim, and is counted (`incomparable`):

| compared | refused as | loads |
| --- | --- | --- |
| token ids, and how many | `mismatch`: they differ | one side has embeddings or no digest (`absent`) |
| multimodal items, by place | `mismatch`: hashes of content, made alike, differ | no item; a client's name |
| LoRA adapter, by its weights | `mismatch`: both were read, and differ | one side has none, or can't read it |
| LoRA's name, cache salt, items' names | never: KV does not depend on them | they differ |
| the stamp's own format | never | a peer's shim of another version |
| the lease | `expired`: it ran out | |
| the MAC, with a key | `rejected`: it does not hold | |

No item here: a gateway may send decode the expanded token ids without the picture, whose KV comes with the
hand-off; what decode would prefill itself were placeholders, and its answer wrong.

The prompt is digested in the API server, once (`digest`); the stamp is made and checked in EngineCore,
which has only what was digested.
"""

from __future__ import annotations

import hmac
import os
import re
from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from shim.config import STAMP_KEY_ENV
from shim.telemetry.catalog import StampResult
from shim.trace_context import Traceparent  # noqa: TC001  # msgspec looks it up

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KEY: Final = "kv_shim_stamp"
"""The hand-off's key. No connector reads it; routers pass the hand-off on whole."""
VERSION: Final = 2
MAX_TOKENS: Final = 2**31 - 1
MAX_ITEMS: Final = 128
"""Multimodal items whose content is compared one by one; of further ones it only shows that they differ."""
_DIGEST_BYTES: Final = 16
_SHORT_BYTES: Final = 8
_CONTENT_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""What vLLM's `MultiModalHasher` gives (blake3, sha256, sha512)."""

_Hex = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * _DIGEST_BYTES}}}\Z")]
_Short = Annotated[str, Meta(pattern=rf"^(|[0-9a-f]{{{2 * _SHORT_BYTES}}})\Z")]
_Time = Annotated[float, Meta(ge=0, le=1e12)]
_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is compared of a prompt's first `k` tokens.

    Attributes:
        k: how many tokens.
        digest: of their ids.
        content: offset in tokens and hash of the content, of each multimodal item that has one.
        hashing: what those hashes depend on besides the content; hashes made otherwise prove nothing.
        adapter: the LoRA adapter's weights; empty for none, or for one that could not be read.
        names: what merely has a name; empty if nothing has.
    """

    k: _Tokens
    digest: _Hex
    content: Annotated[tuple[tuple[_Tokens, _Short], ...], Meta(max_length=MAX_ITEMS)] = ()
    hashing: _Short = ""
    adapter: _Short = ""
    names: _Short = ""


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stamp as it travels.

    Attributes:
        version: of this format.
        prompt: prefill's, whose KV holds at least `k` tokens; with a key, `digest` is the MAC over its digest
            and all else here.
        issued: Unix seconds.
        lease: seconds that prefill keeps the blocks.
        traceparent: W3C context of prefill's span, or empty.
    """

    version: Annotated[int, Meta(ge=VERSION, le=VERSION)]
    prompt: Prompt
    issued: _Time
    lease: Annotated[float, Meta(ge=0, le=1e6)]
    traceparent: Traceparent = ""


def stamp_key() -> bytes:
    """The fleet's key from `SHIM_STAMP_KEY`; empty = none."""
    return os.environ.get(STAMP_KEY_ENV, "").encode()


def digest(
    token_ids: Sequence[int] | None,
    k: int,
    *,
    items: Iterable[tuple[int, str]] = (),
    hashing: str = "",
    adapter: str = "",
    names: Iterable[str] = (),
) -> Prompt | None:
    """Digest a prompt in one pass.

    Args:
        token_ids: the prompt; `None` for one given as embeddings, which gets no stamp.
        k: cover this many tokens from the start; no more than there are.
        items: offset in tokens and identifier of each multimodal item; those at or past `k` do not count.
        hashing: what identifiers that are hashes depend on besides the content; empty if they are a client's.
        adapter: the LoRA adapter's weights, digested; empty for none.
        names: other names that come with the prompt (the LoRA's, the cache salt), each with its kind.

    Returns:
        `None` if there is nothing to digest: embeddings, no tokens, or ids that are no 64-bit integers.
    """
    if not token_ids:
        return None
    k = min(k, len(token_ids))
    try:
        tokens = array("q", token_ids if k == len(token_ids) else token_ids[:k])
    except (TypeError, OverflowError):
        return None
    content: list[tuple[int, str]] = []
    named = [*names]
    for offset, identifier in items:
        if offset >= k:
            continue
        if hashing and len(content) < MAX_ITEMS and _CONTENT_HASH.fullmatch(identifier):
            content.append((offset, _short(identifier)))
        else:
            named.append(f"{offset}:{identifier}")
    return Prompt(
        k,
        blake2b(tokens, digest_size=_DIGEST_BYTES, person=b"kv_shim_prompt_2").hexdigest(),
        tuple(content),
        _short(hashing) if content else "",
        _short(adapter) if adapter else "",
        _short(*named) if named else "",
    )


def make(prompt: Prompt, *, issued: float, lease: float, traceparent: str = "", key: bytes = b"") -> Stamp:
    """A stamp for a hand-off.

    Args:
        prompt: the digest over tokens that the hand-off's KV holds.
        issued: Unix seconds.
        lease: seconds that prefill keeps the blocks.
        traceparent: W3C context of prefill's span.
        key: the fleet's key; empty = no MAC.
    """
    stamp = Stamp(VERSION, prompt, round(issued, 3), round(lease, 3), traceparent)
    return _sealed(stamp, prompt.digest, key)


def encode(stamp: Stamp) -> dict[str, object]:
    """The stamp as plain JSON values, for the hand-off."""
    plain: dict[str, object] = msgspec.to_builtins(stamp)
    return plain


def decode(raw: object) -> Stamp | None:
    """A stamp that came with params; `None` if it is not one. `raw` is hostile."""
    if not isinstance(raw, dict) or len(raw) > len(Stamp.__struct_fields__):
        return None
    try:
        return msgspec.convert(raw, Stamp)
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError):
        return None


def is_foreign(raw: object) -> bool:
    """Whether this is a stamp of a shim with another format: no mistake, only not to be compared."""
    return isinstance(raw, dict) and type(version := raw.get("version")) is int and version != VERSION


def covered(raw: object) -> int | None:
    """How many prompt tokens the digest must cover to check this stamp; `None` if it is no stamp."""
    stamp = decode(raw)
    return None if stamp is None else stamp.prompt.k


def check(  # noqa: PLR0911  # one rule a return
    stamp: Stamp,
    prompt: Prompt | None,
    *,
    prompt_tokens: int,
    now: float,
    clock_skew: float,
    key: bytes = b"",
    backoff: int = 1,
) -> StampResult:
    """Check a stamp against this server's prompt and clock, as the module's table says.

    Args:
        stamp: what prefill said.
        prompt: the digest of this prompt's first `stamp.prompt.k` tokens; `None` if nobody made one.
        prompt_tokens: this prompt's length.
        now: Unix seconds.
        clock_skew: seconds by which the clocks may differ.
        key: the fleet's key; empty = none.
        backoff: trailing prompt tokens that are computed here in any case.

    Returns:
        `REJECTED` for a MAC that does not hold, `ABSENT` if only the digest is missing to check against.
    """
    theirs = stamp.prompt
    # With a key only the whole can be checked, so without a digest nothing the stamp says may count.
    if prompt is None and key:
        return StampResult.ABSENT
    if now > stamp.issued + stamp.lease + clock_skew:
        return StampResult.EXPIRED
    if theirs.k > prompt_tokens or theirs.k + max(backoff, 1) < prompt_tokens:
        return StampResult.MISMATCH
    if prompt is None:
        return StampResult.ABSENT
    if prompt.k != theirs.k:
        return StampResult.MISMATCH
    if not hmac.compare_digest(_sealed(stamp, prompt.digest, key).prompt.digest, theirs.digest):
        return StampResult.REJECTED if key else StampResult.MISMATCH
    if _contradict(prompt, theirs):
        return StampResult.MISMATCH
    return (
        StampResult.OK
        if msgspec.structs.replace(prompt, digest=theirs.digest) == theirs
        else StampResult.INCOMPARABLE
    )


def _contradict(ours: Prompt, theirs: Prompt) -> bool:
    """Whether both sides know something of the same thing that proves it another."""
    if ours.adapter and theirs.adapter and ours.adapter != theirs.adapter:
        return True
    there = dict(theirs.content) if ours.hashing == theirs.hashing else {}
    return any(there.get(offset, found) != found for offset, found in ours.content)


def _sealed(stamp: Stamp, tokens_digest: str, key: bytes) -> Stamp:
    """The stamp over a prompt whose token ids have this digest: with a key, the MAC takes its place."""
    replaced = msgspec.structs.replace
    stamp = replaced(stamp, prompt=replaced(stamp.prompt, digest=tokens_digest))
    if not key:
        return stamp
    # blake2b takes keys of up to 64 bytes; a longer one is digested first.
    short = key if len(key) <= 64 else blake2b(key).digest()  # noqa: PLR2004  # blake2b's limit
    mac = blake2b(msgspec.json.encode(stamp), key=short, digest_size=_DIGEST_BYTES, person=b"kv_shim_stamp__2")
    return replaced(stamp, prompt=replaced(stamp.prompt, digest=mac.hexdigest()))


def _short(*texts: str) -> str:
    hasher = blake2b(digest_size=_SHORT_BYTES)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()
