"""The stamp on a hand-off: by it decode can tell whether prefill's KV is its own prompt's.

Prefill puts it into the hand-off under `KEY`, decode takes it out before the connector looks. It can only
ever cause a local prefill, never trust. With `SHIM_STAMP_KEY` it is a keyed MAC; without, it guards
against mistakes, not attackers. Pure Python.

The prompt is digested in the API server, once (`digest`); the stamp is made and checked in EngineCore,
which has only that digest.
"""

from __future__ import annotations

import hmac
import os
import re
from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from shim.config import STAMP_KEY_ENV
from shim.telemetry.catalog import StampResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KEY: Final = "kv_shim_stamp"
"""The hand-off's key. No connector reads it; routers pass the hand-off on whole."""
VERSION: Final = 1
MAX_TOKENS: Final = 2**31 - 1
_DIGEST_BYTES: Final = 16
_HEX = re.compile(rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")

_Hex = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * _DIGEST_BYTES}}}\Z")]
_Traceparent = Annotated[str, Meta(pattern=r"^(|00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})\Z")]
_Time = Annotated[float, Meta(ge=0, le=1e12)]


class Prompt(NamedTuple):
    """The digest of a prompt's first `k` tokens and of all else that its KV depends on."""

    k: int
    digest: str


class Stamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stamp as it travels.

    Attributes:
        version: of this format.
        k: how many prompt tokens the digest covers; prefill's KV holds at least as many.
        digest: of the prompt, or with a key the MAC over the prompt's digest and all fields here.
        issued: Unix seconds.
        lease: seconds that prefill keeps the blocks.
        traceparent: W3C context of prefill's span, or empty.
    """

    version: Annotated[int, Meta(ge=1, le=255)]
    k: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    digest: _Hex
    issued: _Time
    lease: Annotated[float, Meta(ge=0, le=1e6)]
    traceparent: _Traceparent = ""


def stamp_key() -> bytes:
    """The fleet's key from `SHIM_STAMP_KEY`; empty = none."""
    return os.environ.get(STAMP_KEY_ENV, "").encode()


def digest(
    token_ids: Sequence[int] | None,
    k: int,
    *,
    multimodal: Iterable[tuple[str, int]] = (),
    lora: str = "",
    cache_salt: str = "",
) -> Prompt | None:
    """Digest a prompt in one pass.

    Args:
        token_ids: the prompt; `None` for one given as embeddings, which gets no stamp.
        k: cover this many tokens from the start; no more than there are.
        multimodal: identifier and offset in tokens of each item; those at or past `k` do not count.
        lora: the adapter's name, or empty.
        cache_salt: the request's, or empty.

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
    hasher = blake2b(tokens, digest_size=_DIGEST_BYTES, person=b"kv_shim_prompt_1")
    for identifier, offset in multimodal:
        if offset < k:
            _feed(hasher, b"m", f"{offset}:{identifier}")
    _feed(hasher, b"l", lora)
    _feed(hasher, b"s", cache_salt)
    return Prompt(k, hasher.hexdigest())


def make(prompt: Prompt, *, issued: float, lease: float, traceparent: str = "", key: bytes = b"") -> Stamp:
    """A stamp for a hand-off.

    Args:
        prompt: the digest over tokens that the hand-off's KV holds.
        issued: Unix seconds.
        lease: seconds that prefill keeps the blocks.
        traceparent: W3C context of prefill's span.
        key: the fleet's key; empty = no MAC.
    """
    issued, lease = round(issued, 3), round(lease, 3)
    sealed = _seal(prompt, VERSION, issued, lease, traceparent, key) if key else prompt.digest
    return Stamp(VERSION, prompt.k, sealed, issued, lease, traceparent)


def encode(stamp: Stamp) -> dict[str, object]:
    """The stamp as plain JSON values, for the hand-off."""
    return {name: getattr(stamp, name) for name in Stamp.__struct_fields__}


def decode(raw: object) -> Stamp | None:
    """A stamp that came with params; `None` if it is not one. `raw` is hostile."""
    if not isinstance(raw, dict) or len(raw) > len(Stamp.__struct_fields__):
        return None
    try:
        stamp = msgspec.convert(raw, Stamp)
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError):
        return None
    return stamp if stamp.version == VERSION else None


def covered(raw: object) -> int | None:
    """How many prompt tokens the digest must cover to check this stamp; `None` if it is no stamp."""
    stamp = decode(raw)
    return None if stamp is None else stamp.k


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
    """Check a stamp against this server's prompt and clock.

    Args:
        stamp: what prefill said.
        prompt: the digest of this prompt's first `stamp.k` tokens; `None` if nobody made one.
        prompt_tokens: this prompt's length.
        now: Unix seconds.
        clock_skew: seconds by which the clocks may differ.
        key: the fleet's key; empty = none.
        backoff: trailing prompt tokens that are computed here in any case.

    Returns:
        `REJECTED` for a MAC that does not hold, `ABSENT` if only the digest is missing to check against.
    """
    # With a key only the whole can be checked, so without a digest nothing the stamp says may count.
    if prompt is None and key:
        return StampResult.ABSENT
    if now > stamp.issued + stamp.lease + clock_skew:
        return StampResult.EXPIRED
    if stamp.k > prompt_tokens or stamp.k + max(backoff, 1) < prompt_tokens:
        return StampResult.MISMATCH
    if prompt is None:
        return StampResult.ABSENT
    if prompt.k != stamp.k:
        return StampResult.MISMATCH
    wanted = prompt.digest
    if key:
        wanted = _seal(prompt, stamp.version, stamp.issued, stamp.lease, stamp.traceparent, key)
    if hmac.compare_digest(wanted, stamp.digest):
        return StampResult.OK
    return StampResult.REJECTED if key else StampResult.MISMATCH


def read_prompt(k: object, digest_hex: object) -> Prompt | None:
    """The entrypoint's digest as it came through `extra_args`; `None` if it is none."""
    if type(k) is int and 0 <= k <= MAX_TOKENS and isinstance(digest_hex, str) and _HEX.fullmatch(digest_hex):
        return Prompt(k, digest_hex)
    return None


def _seal(prompt: Prompt, version: int, issued: float, lease: float, traceparent: str, key: bytes) -> str:
    text = f"{version}|{prompt.k}|{prompt.digest}|{issued:.3f}|{lease:.3f}|{traceparent}"
    # blake2b takes keys of up to 64 bytes; a longer one is digested first.
    short = key if len(key) <= 64 else blake2b(key).digest()  # noqa: PLR2004  # blake2b's limit
    return blake2b(text.encode(), key=short, digest_size=_DIGEST_BYTES, person=b"kv_shim_stamp__1").hexdigest()


def _feed(hasher: blake2b, label: bytes, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    hasher.update(label + len(data).to_bytes(8, "little"))
    hasher.update(data)
