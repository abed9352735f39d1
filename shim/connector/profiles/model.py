"""What a connector's profile says; `table` fills it in, `guard` acts on it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from shim.verdict import Ask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shim.connector.profiles.keys import Key


class Side(Enum):
    """Which servers may be asked this, by `kv_role`."""

    ANY = "any"
    CONSUMER = "consumer"  # not a pure `kv_producer`
    PRODUCER = "producer"  # not a pure `kv_consumer`


class Variant(StrEnum):
    """A start-up option of the inner connector that a rule depends on."""

    ALWAYS = "always"
    BIDIRECTIONAL = "bidirectional"  # NIXL's `bidirectional_kv_xfer`
    READ = "read"  # MoRIIO's `read_mode`
    WRITE = "write"


class Granule(StrEnum):
    """The unit in which loads come, for telling a tail from a fault."""

    TOKEN = "token"  # noqa: S105  # no password
    BLOCK = "block"
    CHUNK = "chunk"  # the connector's own, e.g. LMCache's chunk or Offloading's block


@dataclass(frozen=True, slots=True)
class Peer:
    """Keys that name a peer which this request makes the engine contact.

    Attributes:
        host: key of its host or hosts.
        ports: keys of its ports.
        url: key of its URL, instead of host and ports.
        engine_id: key of its engine id.
        record: key of the `RECORD` in which these keys are; empty = the params themselves.
        in_request_id: its address may be in the engine request's id instead (MoRIIO's router).
    """

    host: str = ""
    ports: tuple[str, ...] = ()
    url: str = ""
    engine_id: str = ""
    record: str = ""
    in_request_id: bool = False


@dataclass(frozen=True, slots=True)
class Mode:
    """One thing that params can ask for, and what they need for it.

    Attributes:
        ask: the thing.
        trigger: the key that asks for it: a flag that is true, or any other key that is there.
        required: keys that may be neither absent nor null.
        present: keys that may be null, but not absent.
        peers: the peers it contacts.
        claim: the keys that identify one hand-off; empty = may repeat.
        sources: keys of the peer's parallel sizes, the tensor parallel size first, where a peer frees only what
            was read: a load may then be tried again if all workers report that it failed. With a size over 1
            (the first: over this server's own) a worker reads from several of the peer's, and one of these may
            have been read before another failed. Empty = whatever failed may be gone.
        blocks: the key of the remote block ids, if they must fit the prompt.
        tokens: the key of the number of tokens that the peer holds.
        request_id: the key of the peer's request id.
        side: which servers may be asked.
        variant: under which start-up option this mode counts.
    """

    ask: Ask
    trigger: str
    required: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    peers: tuple[Peer, ...] = ()
    claim: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    blocks: str = ""
    tokens: str = ""
    request_id: str = ""
    side: Side = Side.ANY
    variant: Variant = Variant.ALWAYS


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything the shim knows of a connector.

    Attributes:
        name: the connector's registered name.
        known: `False` = observe only: nothing but a non-dict is refused.
        keys: the keys it reads.
        modes: what its params can ask for.
        readback: prefill's optional pull of blocks that a decode server kept (NIXL, turn 2).
        flags: mutually exclusive flags, load first.
        handoff_keys: keys that make no sense without a flag; params that have them but no flag are broken.
        loads_unasked: the start-up option under which it reports tokens as remote whatever the params
            say (MoRIIO READ); a request that asks for no load must then be answered 0 in its stead.
        spent_key: a mark that the connector leaves in the params once it has queued their load; what it
            reports as remote after that, it never loads (see `Guard.spent`).
        params_needed: whether nothing is ever loaded without params, i.e. whether missing params matter.
        reads_extra_args: it reads `sampling_params.extra_args` past `request.kv_transfer_params`.
        issues: whether `request_finished` ever returns a hand-off.
        issues_on_stop: whether it does so for requests that finish `stop` and not only `length`.
        fatal_without_output: keys that kill the engine in `request_finished` if nothing was generated.
        back_off: prompt tokens that decode computes even if all were loaded.
        granule: the unit in which loads come.
    """

    name: str
    known: bool = True
    keys: Mapping[str, Key] = field(default_factory=dict)
    modes: tuple[Mode, ...] = ()
    readback: Mode | None = None
    flags: tuple[str, ...] = ()
    handoff_keys: tuple[str, ...] = ()
    loads_unasked: Variant | None = None
    spent_key: str = ""
    params_needed: bool = True
    reads_extra_args: bool = False
    issues: bool = False
    issues_on_stop: bool = False
    fatal_without_output: tuple[str, ...] = ()
    back_off: int = 1
    granule: Granule = Granule.BLOCK

    @property
    def hands_off_silently(self) -> bool:
        """Whether a hand-off is made by keeping the blocks alone: the router makes the params up (Mooncake)."""
        return not self.issues and any(mode.ask is Ask.HANDOFF for mode in self.modes)
