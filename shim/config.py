"""The shim's settings: `kv_connector_extra_config["shim"]`, typed, and its environment variables.

A wrong setting raises `SettingsError`, which says who, what was found, what was wanted and what to do.
Imports neither vLLM nor torch.
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

SECTION = "shim"
"""The key in `kv_connector_extra_config` under which the settings live, and the sugar's name."""

DISABLE_ENV = "SHIM_DISABLE"
ENTRYPOINT_ENV = "SHIM_ENTRYPOINT"
STAMP_KEY_ENV = "SHIM_STAMP_KEY"


class SettingsError(ValueError):
    """A setting the shim can't run with; stops the start."""


class ExpectRemote(StrEnum):
    """When a request without usable transfer params is a fault."""

    ALWAYS = "always"
    NEVER = "never"
    AUTO = "auto"


_DEFAULT_EXPECT = {
    "kv_consumer": ExpectRemote.ALWAYS,
    "kv_producer": ExpectRemote.NEVER,
    "kv_both": ExpectRemote.AUTO,
}


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator can set; the README's table is generated from these fields.

    Attributes:
        connector: the inner KV connector: a name registered in vLLM, or `package.module:Class`.
        expect_remote: when missing params are a fault: `always`, `never`, `auto`
            (default: by `kv_role`: `kv_consumer` always, `kv_producer` never, `kv_both` auto).
        trusted_router_marks: body keys or headers (`header:<name>`) by which a router says that it
            tried (`<mark>`) or kept the request local on purpose (`<mark>=local`).
        params_header: header that may carry transfer params as JSON; needs `allow_peers`.
        normalize_prefill: on prefill, make `do_remote_decode` requests with `max_tokens=1` end by
            length, so that connectors which issue nothing on `stop` issue a hand-off.
        allow_peers: peers decode may contact: `host[:ports]` or `cidr[:ports]`; empty = any but
            link-local, multicast and unspecified addresses.
        peer_max_tp: largest `tp_size` a peer may claim.
        peer_max_pp: largest `pp_size` a peer may claim.
        clock_skew: seconds by which prefill's and decode's clocks may differ.
        on_local_prefill: what to do with a request that would be prefilled locally for a fault
            that the API server can see: `allow`, `refuse`, or the longest prompt to allow, in tokens.
        load_timeout: seconds the entrypoint waits for remote KV before it aborts; null = no bound.
    """

    connector: Annotated[str, Meta(min_length=1)] = "NixlConnector"
    expect_remote: Literal["always", "never", "auto"] | None = None
    trusted_router_marks: tuple[Annotated[str, Meta(min_length=1, max_length=128)], ...] = ()
    params_header: Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{1,64}\Z")] | None = None
    normalize_prefill: bool = False
    allow_peers: tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...] = ()
    peer_max_tp: Annotated[int, Meta(ge=1)] = 64
    peer_max_pp: Annotated[int, Meta(ge=1)] = 16
    clock_skew: Annotated[float, Meta(ge=0)] = 5.0
    on_local_prefill: Literal["allow", "refuse"] | Annotated[int, Meta(ge=0)] = "allow"
    load_timeout: Annotated[float, Meta(gt=0)] | None = None

    def expectation(self, kv_role: str | None) -> ExpectRemote:
        """When missing params are a fault on a server of this role."""
        if self.expect_remote is not None:
            return ExpectRemote(self.expect_remote)
        return _DEFAULT_EXPECT.get(kv_role or "kv_both", ExpectRemote.AUTO)


def read_settings(extra_config: Mapping[str, Any] | None) -> Settings:
    """The settings in a `kv_connector_extra_config`.

    Raises:
        SettingsError: not a mapping, an unknown key, or a value of the wrong type.
    """
    raw = (extra_config or {}).get(SECTION, {})
    where = f'kv_connector_extra_config["{SECTION}"]'
    if isinstance(raw, Settings):
        return raw
    if not isinstance(raw, Mapping):
        msg = f"{where}: found {_short(raw)}, wanted a JSON object of settings; write e.g. {{}} or leave it out"
        raise SettingsError(msg)
    known = {field.name: field for field in msgspec.structs.fields(Settings)}
    for name in raw:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else "remove it"
            msg = f"{where}: found unknown key {_short(name)}, wanted one of {', '.join(known)}; {advice}"
            raise SettingsError(msg)
    try:
        settings = msgspec.convert(dict(raw), Settings)
    except msgspec.ValidationError as error:
        text = str(error)
        name = (
            text.rsplit("$.", 1)[-1].split("`", maxsplit=1)[0].split("[", maxsplit=1)[0]
            if "$." in text
            else "?"
        )
        msg = f"{where}: found {name} = {_short(raw.get(name))}; {text}; correct {name} and start again"
        raise SettingsError(msg) from error
    if settings.params_header and not settings.allow_peers:
        msg = (
            f"{where}: found params_header = {settings.params_header!r} without allow_peers, wanted a list of "
            "peers: any client can send a header; add allow_peers or remove params_header"
        )
        raise SettingsError(msg)
    return settings


def flag(name: str) -> bool:
    """Whether an environment switch is on: set to anything but `""`, `0`, `false` or `no`."""
    return os.environ.get(name, "").strip().lower() not in {"", "0", "false", "no"}


def _short(value: object) -> str:
    return reprlib.repr(value)
