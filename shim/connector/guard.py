"""Screening: what the inner connector may see of a request's transfer params, and what the shim does instead.

One pass per request, before the inner connector sees anything; sizes are checked before they are walked.
`screen` must be asked once per engine request, with the params as they came: connectors leave marks of
their own in the dict (`_p_side_truncated`), which a client may not set. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from shim import stamp as stamps
from shim.connector.claims import ClaimKey, Claims
from shim.connector.peers import AllowList, Breakers
from shim.connector.profiles import Mode, Profile, Side, Variant
from shim.connector.profiles.addresses import addresses, embedded
from shim.connector.profiles.keys import Check, Kind, blocks_problem, compile_check, plain
from shim.connector.profiles.layout import SLACK, Group, GroupKind, counts_problem
from shim.telemetry.catalog import StampResult
from shim.verdict import Ask, PeerKey, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shim.config import Settings

MAX_KEYS: Final = 64
MAX_DETAIL: Final = 128
UNKNOWN_KEY: Final = "<unknown key>"

_FLAG_TYPES = frozenset({bool, int})
_FLAG_VALUES = (True, False)


class Screened(msgspec.Struct, frozen=True):
    """What came of screening one request's params.

    Attributes:
        params: what the inner connector may see; `None` = nothing.
        reason: `NONE`, or why there is nothing to load, or why it may not.
        tell: the params stay, so that the inner tells prefill to free its blocks, but nothing is loaded:
            the answer to `get_num_new_matched_tokens` is `(0, False)`.
        detail: for the log, naming only keys that the profile knows; printable ASCII, at most 128.
        ask: what the params ask for after screening: a refused load asks for `NOTHING`, a refused hand-off
            is still the work of a prefill server.
        stamp: what checking the stamp gave; `None` where none was to be checked.
        issued_at: when prefill issued the hand-off (Unix time, from the stamp; 0.0 = not known).
        linked_traceparent: prefill's span, from the stamp.
        peer: the peer that is contacted, by which its breaker is known; `None` = nobody.
        peer_request_id: the request's id there.
    """

    params: dict[str, Any] | None
    reason: Reason
    tell: bool
    detail: str
    ask: Ask
    stamp: StampResult | None = None
    issued_at: float = 0.0
    linked_traceparent: str = ""
    peer: PeerKey | None = None
    peer_request_id: str = ""


class _Refused(Exception):  # noqa: N818  # no error: how a rule ends the screening
    def __init__(self, reason: Reason, detail: str, *, ask: Ask = Ask.NOTHING) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
        # A load that is refused asks for nothing any more; a prefill remains one.
        self.ask = ask if ask is Ask.HANDOFF else Ask.NOTHING


_FAILING: Final = "the peer failed several times in a row"


class Guard:
    """Screens the params of one engine's requests. Not thread-safe: lives on the scheduler's thread."""

    def __init__(
        self,
        profile: Profile,
        settings: Settings,
        *,
        group_count: int | None,
        block_size: int | None,
        is_producer: bool,
        is_consumer: bool,
        engine_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        groups: Sequence[Group] | None = None,
        backoff: int = 0,
        extra_config: Mapping[str, Any] | None = None,
        host_buffer: bool = False,
        claims: Claims | None = None,
        breakers: Breakers | None = None,
        stamp_key: bytes | None = None,
        tp_size: int = 1,
    ) -> None:
        """Decide all that can be decided once.

        Args:
            profile: the inner connector's.
            settings: the operator's.
            group_count: KV cache groups that are transferred, `None` if not known.
            block_size: tokens a block of the scheduler's holds, `None` if not known.
            is_producer: the server may prefill for others (`kv_producer` or `kv_both`).
            is_consumer: the server may load from others (`kv_consumer` or `kv_both`).
            engine_id: this engine's.
            clock: seconds, never going back.
            wall_clock: Unix seconds, for stamps.
            groups: the groups by kind (`profiles.layout.layout`); without them one group is taken for
                full attention, and several are not counted.
            backoff: trailing prompt tokens that prefill leaves out (NIXL's `_prefill_backoff`).
            extra_config: the inner connector's `kv_connector_extra_config`.
            host_buffer: NIXL stages in host memory (`kv_buffer_device: cpu` on a GPU); it then queues no
                read-back that it promised (nixl/pull_scheduler.py `update_state_after_alloc`).
            claims: the engine's claim table; a new one by default.
            breakers: the engine's circuit breakers; new ones by default.
            stamp_key: the fleet's; by default from the environment.
            tp_size: this server's tensor parallel size.

        Raises:
            SettingsError: `allow_peers` has a bad entry.
        """
        self.profile = profile
        self.engine_id = engine_id
        self.claims = claims if claims is not None else Claims(clock)
        self.breakers = breakers if breakers is not None else Breakers(clock)
        self.allow_list = AllowList(settings.allow_peers)
        self._wall_clock = wall_clock
        self._skew = settings.clock_skew
        self._tp_size = tp_size
        self._stamp_key = stamps.stamp_key() if stamp_key is None else stamp_key
        self._backoff = backoff
        self._stamped_backoff = max(backoff, profile.back_off)
        if groups is None and group_count == 1 and block_size:
            groups = (Group(GroupKind.FULL, block_size),)
        self._groups = groups
        self._group_count = group_count if groups is None else len(groups)
        variants = _variants(extra_config or {}, host_buffer=host_buffer)
        self._bidirectional = Variant.BIDIRECTIONAL in variants
        self._role = "kv_producer" if is_producer else "kv_consumer"
        self._modes = tuple(m for m in profile.modes if m.variant in variants)
        refused = {
            Side.CONSUMER: is_producer and not is_consumer,
            Side.PRODUCER: is_consumer and not is_producer,
        }
        every = (*profile.modes, *([profile.readback] if profile.readback else []))
        self._not_here = frozenset(m.trigger for m in every if refused.get(m.side))
        self._rules: dict[str, Check | None] = {
            name: compile_check(key, max_tp=settings.peer_max_tp, max_pp=settings.peer_max_pp)
            for name, key in profile.keys.items()
        }
        self._defaulted = frozenset(name for name, key in profile.keys.items() if not key.nullable)
        self._dropped = frozenset(name for name, key in profile.keys.items() if key.kind is Kind.DROPPED)
        self._block_keys = tuple(name for name, key in profile.keys.items() if key.kind is Kind.BLOCKS)
        self._flag_keys = tuple(name for name, key in profile.keys.items() if key.kind is Kind.FLAG)
        self._readback = _readback_keys(profile)
        loads = {mode.blocks for mode in self._modes if mode.ask is Ask.LOAD}
        reads = {profile.readback.blocks} if profile.readback and self._bidirectional else set()
        flags = set(self._flag_keys)
        self._measured = {
            (False, False): flags,
            (True, False): flags | loads,
            (False, True): flags | reads,
        }

    def screen(
        self,
        request_id: str,
        params: object,
        *,
        prompt_tokens: int,
        external_id: str = "",  # noqa: ARG002  # part of the seam: rules by outside id may come
        sibling: bool = False,
        prompt: stamps.Prompt | None = None,
        cleanup: bool = False,
    ) -> Screened:
        """Decide what the inner connector may see of these params.

        Args:
            request_id: the engine request's id, which will own the hand-off.
            params: as they came; hostile.
            prompt_tokens: the prompt's length.
            external_id: the request's id as seen outside.
            sibling: another engine request of the same HTTP request has the hand-off.
            prompt: the entrypoint's digest of the prompt, for the stamp.
            cleanup: it generates nothing and would only have prefill free its blocks; what any request ever
                had is that request's to free, or a retry's to load.
        """
        if params is None:
            return _MISSING
        if not isinstance(params, dict):
            return _refused(_Refused(Reason.PARAMS_INVALID, "kv_transfer_params: wanted a JSON object"))
        if not params:
            return _EMPTY
        if not self.profile.known:
            return _observed(params)
        try:
            return self._screen(
                request_id, params, prompt_tokens, sibling=sibling, prompt=prompt, cleanup=cleanup
            )
        except _Refused as refused:
            return _refused(refused)

    def spent(self, params: object) -> bool:
        """Whether the load that these params ask for was queued before.

        The answer to `get_num_new_matched_tokens` must then be `(0, False)`: what the inner promises a
        second time, it never loads (NIXL's read-back on prefill).

        Args:
            params: as they are now.
        """
        key = self.profile.spent_key
        return bool(key) and isinstance(params, dict) and bool(params.get(key))

    def for_finish(self, params: object, *, has_output: bool) -> dict[str, Any] | None:
        """The params that `request_finished` may see.

        Some connectors index into a generated token that an aborted request does not have.

        Args:
            params: as they are now.
            has_output: whether the request generated a token.

        Returns:
            The same dict, or a copy without what would raise.
        """
        if not isinstance(params, dict):
            return None
        fatal = self.profile.fatal_without_output
        if has_output or not any(name in params for name in fatal):
            return params
        return {name: value for name, value in params.items() if name not in fatal}

    def _screen(
        self,
        request_id: str,
        params: dict[str, Any],
        prompt_tokens: int,
        *,
        sibling: bool,
        prompt: stamps.Prompt | None,
        cleanup: bool,
    ) -> Screened:
        """The rules, in the order in which they bind."""
        if len(params) > MAX_KEYS:
            raise _Refused(Reason.PARAMS_INVALID, f"wanted at most {MAX_KEYS} keys")
        load, handoff = self._flags(params)
        clean, notes = self._clean(params, load=load, handoff=handoff)
        modes = [mode for mode in self._modes if clean.get(mode.trigger)]
        if not modes:
            return self._not_remote(clean, params)
        if cleanup and any(self.claims.known(key) for key, _ in self._claim_keys(modes, clean)):
            raise _Refused(Reason.HANDOFF_REUSED, "a request had this hand-off")
        misfit, loads = "", False
        for mode in modes:
            loads = loads or mode.ask is Ask.LOAD
            self._needs(mode, clean, request_id)
            if mode.blocks:
                misfit = misfit or self._blocks(mode, clean, prompt_tokens)
        if not loads:
            return self._handoff(modes, clean, notes, request_id, prompt_tokens)
        stamped = self._stamp(params.get(stamps.KEY), prompt, prompt_tokens)
        return self._load(modes, clean, notes, request_id, misfit, stamped, sibling=sibling)

    def _load(  # noqa: PLR0911  # one rule a return
        self,
        modes: Sequence[Mode],
        clean: dict[str, Any],
        notes: str,
        request_id: str,
        misfit: str,
        stamped: tuple[StampResult, stamps.Stamp | None],
        *,
        sibling: bool,
    ) -> Screened:
        """A load: from a peer that may be asked, of a hand-off that is this request's own and fits."""
        peer, peer_request_id = self._contacts(modes, clean, request_id)
        if peer is not None and self.breakers.blocked(peer):
            raise _Refused(Reason.PEER_UNAVAILABLE, _FAILING)
        result, stamp = stamped
        genuine = None if result is StampResult.REJECTED else stamp
        good = Screened(
            clean,
            Reason.NONE,
            tell=False,
            detail=_detail(notes) if notes else "",
            ask=Ask.LOAD,
            stamp=result,
            issued_at=genuine.issued if genuine else 0.0,
            linked_traceparent=genuine.traceparent if genuine else "",
            peer=peer,
            peer_request_id=peer_request_id,
        )
        if result is StampResult.EXPIRED:
            return _gone(good, Reason.HANDOFF_EXPIRED, "prefill's lease has run out")
        if result is StampResult.REJECTED:
            return _gone(good, Reason.HANDOFF_MISMATCH, "the hand-off's stamp is not genuine")
        if not self._claimed(modes, clean, request_id, None if stamp is None else stamp.lease):
            # Another request reads these blocks now; a notification from here would free them.
            return _gone(good, *self._taken(modes, clean, sibling=sibling))
        if sibling:
            return self._told(good, Reason.UNSUPPORTED_MODE, "a further request of one HTTP request")
        if result is StampResult.MISMATCH:
            return self._told(good, Reason.HANDOFF_MISMATCH, "the stamp is for another prompt")
        if misfit:
            return self._told(good, Reason.HANDOFF_MISMATCH, misfit)
        if peer is not None and not self.breakers.allowed(peer):
            raise _Refused(Reason.PEER_UNAVAILABLE, _FAILING)
        return good

    def _handoff(
        self, modes: Sequence[Mode], clean: dict[str, Any], notes: str, request_id: str, prompt_tokens: int
    ) -> Screened:
        """A prefill that is to keep its KV for a decode server, and may first read some back from one."""
        readback = self.profile.readback
        if readback is not None and self._bidirectional and clean.get(readback.trigger):
            try:
                self._check_readback(readback, clean, request_id, prompt_tokens)
            except _Refused as refused:
                # Prefill can do its work without; only what it would have read back is lost.
                clean = {name: value for name, value in clean.items() if name not in self._readback}
                notes = f"read-back left out: {refused.detail}"
        peer, peer_request_id = self._contacts(modes, clean, request_id)
        if not self._claimed(modes, clean, request_id, None):
            raise _Refused(Reason.HANDOFF_REUSED, "another request is kept under this id", ask=Ask.HANDOFF)
        return Screened(
            clean,
            Reason.NONE,
            tell=False,
            detail=_detail(notes),
            ask=Ask.HANDOFF,
            peer=peer,
            peer_request_id=peer_request_id,
        )

    def _flags(self, params: dict[str, Any]) -> tuple[bool, bool]:
        """Load and hand-off as the flags have it. A string is no flag: "false" is true to a connector."""
        for name in self._flag_keys:
            value = params.get(name)
            # 0 and 1 work with a plain vLLM, so they do here; floats, strings and the like do not.
            if value is not None and (type(value) not in _FLAG_TYPES or value not in _FLAG_VALUES):
                raise _Refused(Reason.PARAMS_INVALID, f"{name}: wanted true or false")
        if not self.profile.flags:
            return False, False
        first, second = self.profile.flags
        load, handoff = bool(params.get(first)), bool(params.get(second))
        if load and handoff:
            names = " and ".join(self.profile.flags)
            raise _Refused(Reason.PARAMS_INVALID, f"{names}: wanted at most one of them true")
        return load, handoff

    def _clean(  # noqa: C901, PLR0912  # one pass, a branch for each kind of key
        self, params: dict[str, Any], *, load: bool, handoff: bool
    ) -> tuple[dict[str, Any], str]:
        """Check every value's shape; leave out what a client may not set, or what nobody here may read."""
        strip = self._readback if handoff and not self._bidirectional else frozenset()
        ask = Ask.HANDOFF if handoff else Ask.NOTHING
        rules, measured = self._rules, self._measured[load, handoff]
        gone: list[str] = []
        notes = wanted = ""
        for name, value in params.items():
            rule = rules.get(name, _UNKNOWN)
            if rule is _UNKNOWN:
                if type(name) is not str:
                    raise _Refused(Reason.PARAMS_INVALID, f"{UNKNOWN_KEY}: wanted keys that are strings")
                if name[:1] == "_" or name == stamps.KEY:
                    gone.append(name)
                elif wanted := plain(value):
                    raise _Refused(Reason.PARAMS_INVALID, f"{UNKNOWN_KEY}: wanted {wanted}", ask=ask)
            elif name in strip:
                gone.append(name)
                if value:
                    notes = f"{name} left out: this server reads nothing back"
            elif value is None:
                if name in self._defaulted:
                    gone.append(name)
            elif rule is not None:
                if wanted := rule(value):
                    raise _Refused(Reason.PARAMS_INVALID, f"{name}: wanted {wanted}", ask=ask)
            elif name in measured:
                pass
            elif name in self._dropped or not (load or handoff):
                gone.append(name)
            # Block ids that no mode will measure against the prompt must be small to be let through.
            elif wanted := plain(value):
                raise _Refused(Reason.PARAMS_INVALID, f"{name}: wanted {wanted}", ask=ask)
        if not gone:
            return params, notes
        clean = dict(params)
        for name in gone:
            del clean[name]
        return clean, notes

    def _not_remote(self, clean: dict[str, Any], params: dict[str, Any]) -> Screened:
        flags = self.profile.flags
        if flags and all(params.get(name) is None for name in flags):
            there = [name for name in self.profile.handoff_keys if clean.get(name) is not None]
            if there:
                wanted = dict.fromkeys(n for mode in self._modes[:1] for n in (mode.trigger, *mode.required))
                missing = ", ".join(name for name in wanted if clean.get(name) is None)
                raise _Refused(Reason.PARAMS_INVALID, f"missing {missing}")
        return Screened(clean, Reason.PARAMS_NOT_REMOTE, tell=False, detail="", ask=Ask.NOTHING)

    def _needs(self, mode: Mode, clean: dict[str, Any], request_id: str) -> None:
        if mode.trigger in self._not_here:
            raise _Refused(
                Reason.PARAMS_INVALID, f"{mode.trigger}: this server is a {self._role}", ask=mode.ask
            )
        missing = [name for name in mode.required if clean.get(name) is None]
        if mode.present:
            missing += [name for name in mode.present if name not in clean]
        for peer in mode.peers:
            if peer.in_request_id and self._embedded(request_id, mode.ask) is None:
                missing += [n for n in (peer.host, *peer.ports) if clean.get(n) is None]
        if missing:
            raise _Refused(Reason.PARAMS_INVALID, "missing " + ", ".join(missing), ask=mode.ask)

    def _embedded(self, request_id: str, ask: Ask) -> list[tuple[str, int]] | None:
        try:
            return embedded(request_id, ask)
        except ValueError as error:
            raise _Refused(Reason.PARAMS_INVALID, str(error), ask=ask) from None

    def _blocks(self, mode: Mode, clean: dict[str, Any], prompt_tokens: int) -> str:
        """Refuse malformed block ids; say why well-formed ones don't fit the prompt."""
        blocks = clean.get(mode.blocks)
        if blocks is None and mode.blocks not in mode.required:
            return ""
        problem, too_long = blocks_problem(blocks, groups=self._group_count, limit=prompt_tokens + SLACK)
        if too_long:
            return problem
        if problem:
            raise _Refused(Reason.PARAMS_INVALID, f"{mode.blocks}: wanted {problem}", ask=mode.ask)
        return counts_problem(
            blocks,  # type: ignore[arg-type]  # checked just now
            self._groups,
            prompt_tokens=prompt_tokens,
            backoff=self._backoff,
            remote_tokens=clean.get(mode.tokens) if mode.tokens else None,
        )

    def _check_readback(self, mode: Mode, clean: dict[str, Any], request_id: str, prompt_tokens: int) -> None:
        self._needs(mode, clean, request_id)
        blocks = clean[mode.trigger]
        held = clean.get(mode.tokens) if mode.tokens else None
        if not isinstance(held, int):
            raise _Refused(Reason.PARAMS_INVALID, f"missing {mode.tokens}")
        problem, _ = blocks_problem(blocks, groups=self._group_count, limit=max(prompt_tokens, held) + SLACK)
        # A decode server's blocks cover a prefix of this longer prompt: it is that prefix they must fit.
        # nixl/pull_scheduler.py takes min(remote_num_tokens, prompt) as what they hold.
        problem = problem or counts_problem(
            blocks,
            self._groups,
            prompt_tokens=min(held, prompt_tokens),
            backoff=0,
            remote_tokens=held,
        )
        if problem:
            raise _Refused(Reason.PARAMS_INVALID, f"{mode.trigger}: {problem}")
        self._contacts([mode], clean, request_id)
        if not self._claimed([mode], clean, request_id, None):
            raise _Refused(Reason.HANDOFF_REUSED, "another request has these blocks")

    def _contacts(
        self, modes: Sequence[Mode], clean: dict[str, Any], request_id: str
    ) -> tuple[PeerKey | None, str]:
        """The first peer that these params make the engine contact, and the request's id there.

        All of them must be allowed.
        """
        first, theirs = None, ""
        for mode in modes:
            for peer in mode.peers:
                for host, port in addresses(peer, clean, request_id, mode.ask):
                    if not self.allow_list.allows(host, port):
                        key = peer.url or peer.host
                        raise _Refused(Reason.PEER_DENIED, f"{key}: not a peer of this server", ask=mode.ask)
                    if first is None:
                        engine_id = clean.get(peer.engine_id) if peer.engine_id else ""
                        first = PeerKey(host, port, engine_id or "")
                        theirs = (clean.get(mode.request_id) if mode.request_id else "") or ""
        return first, theirs

    def _claimed(
        self, modes: Sequence[Mode], clean: dict[str, Any], request_id: str, lease: float | None
    ) -> bool:
        keys = self._claim_keys(modes, clean)
        if len(keys) > 1 and any(self.claims.owner(key) not in {None, request_id} for key, _ in keys):
            return False  # all or none
        return all(
            [  # noqa: C419  # a list is faster
                self.claims.claim(key, request_id, lease, repeatable=repeatable) for key, repeatable in keys
            ]
        )

    def _taken(self, modes: Sequence[Mode], clean: dict[str, Any], *, sibling: bool) -> tuple[Reason, str]:
        """Why a hand-off that another request has may not be loaded, and in whose class that is."""
        if not sibling and any(self.claims.failed(key) for key, _ in self._claim_keys(modes, clean)):
            # A retry, and no client's fault: prefill or the network failed the first try.
            return Reason.LOAD_FAILED, "an earlier load of it failed and may have read a part"
        reason = Reason.UNSUPPORTED_MODE if sibling else Reason.HANDOFF_REUSED
        return reason, "another request has this hand-off"

    def _claim_keys(self, modes: Sequence[Mode], clean: dict[str, Any]) -> list[tuple[ClaimKey, bool]]:
        """The hand-offs that these params name, each with whether a load that failed unread leaves it whole."""
        keys: list[tuple[ClaimKey, bool]] = []
        for mode in modes:
            if mode.claim:
                values = tuple([clean.get(name) for name in mode.claim])
                if None not in values:
                    keys.append((values, self._one_source(mode, clean)))  # type: ignore[arg-type]  # ids, checked
        return keys

    def _one_source(self, mode: Mode, clean: dict[str, Any]) -> bool:
        """Whether each worker here reads from one worker of the peer's."""
        if not mode.sources:
            return False
        sharded, *rest = [clean.get(name) or 1 for name in mode.sources]
        return sharded <= self._tp_size and all(size == 1 for size in rest)

    def _stamp(
        self, raw: object, prompt: stamps.Prompt | None, prompt_tokens: int
    ) -> tuple[StampResult, stamps.Stamp | None]:
        if raw is None:
            return StampResult.ABSENT, None
        stamp = stamps.decode(raw)
        if stamp is None:
            return StampResult.INCOMPARABLE if stamps.is_foreign(raw) else StampResult.REJECTED, None
        result = stamps.check(
            stamp,
            prompt,
            prompt_tokens=prompt_tokens,
            now=self._wall_clock(),
            clock_skew=self._skew,
            key=self._stamp_key,
            backoff=self._stamped_backoff,
        )
        return result, stamp

    def _told(self, good: Screened, reason: Reason, detail: str) -> Screened:
        """Not this request's to load, but prefill may be told that it can free the blocks."""
        params = dict(good.params or {})
        for name in self._block_keys:
            if params.get(name):
                # Enough for the inner to tell prefill, and nothing that it could read.
                params[name] = [[] for _ in range(self._group_count or 1)]
        return msgspec.structs.replace(good, params=params, reason=reason, tell=True, detail=_detail(detail))


_UNKNOWN: Final = plain
"""Stands for "no rule for this key" in a look-up; what no rule knows is checked by it, too."""
_MISSING = Screened(None, Reason.PARAMS_MISSING, tell=False, detail="", ask=Ask.NOTHING)
_EMPTY = Screened(None, Reason.PARAMS_EMPTY, tell=False, detail="", ask=Ask.NOTHING)


def _refused(refused: _Refused) -> Screened:
    return Screened(None, refused.reason, tell=False, detail=_detail(refused.detail), ask=refused.ask)


def _gone(good: Screened, reason: Reason, detail: str) -> Screened:
    """Taken away for good: prefill may not even be told, a notification is contact."""
    return msgspec.structs.replace(good, params=None, reason=reason, detail=_detail(detail), ask=Ask.NOTHING)


def _observed(params: dict[str, Any]) -> Screened:
    """An unknown connector's params, unchanged; what they ask for is a guess by vLLM's usual flags."""
    if params.get("do_remote_prefill") is True:
        ask = Ask.LOAD
    elif params.get("do_remote_decode") is True:
        ask = Ask.HANDOFF
    else:
        return Screened(params, Reason.PARAMS_NOT_REMOTE, tell=False, detail="", ask=Ask.NOTHING)
    return Screened(params, Reason.NONE, tell=False, detail="", ask=ask)


def _variants(extra_config: Mapping[str, Any], *, host_buffer: bool) -> frozenset[Variant]:
    """The start-up options that hold here; each is read as the connector reads it."""
    # moriio_common.py `get_moriio_mode`
    read = str(extra_config.get("read_mode", "false")).lower().strip() in {"true", "1"}
    variants = {Variant.ALWAYS, Variant.READ if read else Variant.WRITE}
    if extra_config.get("bidirectional_kv_xfer") and not host_buffer:
        variants.add(Variant.BIDIRECTIONAL)
    return frozenset(variants)


def _readback_keys(profile: Profile) -> frozenset[str]:
    mode = profile.readback
    if mode is None:
        return frozenset()
    return frozenset({mode.trigger, *mode.required, "remote_blocks_expiry_time"})


def _detail(text: str) -> str:
    """Printable ASCII, cut; the rules write nothing else, so this is the belt to their braces."""
    if not (text.isascii() and text.isprintable()):
        text = "".join(c if " " <= c <= "~" else "?" for c in text)
    return text[:MAX_DETAIL]
