"""The profiles themselves, read from vLLM 0.28.0 and 0.32.0 (`distributed/kv_transfer/kv_connector/v1`).

A key that is wrong here costs a local prefill; one that is missing can cost the engine.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from shim.connector.profiles.keys import Key, Kind
from shim.connector.profiles.model import Granule, Mode, Peer, Profile, Side, Variant
from shim.verdict import Ask

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFILL = "do_remote_prefill"
DECODE = "do_remote_decode"
FLAGS = (PREFILL, DECODE)

_FLAG_KEYS = {PREFILL: Key(Kind.FLAG), DECODE: Key(Kind.FLAG)}

# --- NIXL: nixl/{base_scheduler,pull_scheduler,push_scheduler,metadata,pull_worker,base_worker}.py

_NIXL_KEYS: dict[str, Key] = {
    **_FLAG_KEYS,
    "remote_block_ids": Key(Kind.BLOCKS),
    "remote_engine_id": Key(Kind.IDENT),
    "remote_request_id": Key(Kind.IDENT),
    "remote_host": Key(Kind.HOST),
    "remote_port": Key(Kind.PORT),
    "tp_size": Key(Kind.TP_SIZE, nullable=False),
    "dcp_size": Key(Kind.TP_SIZE, nullable=False),
    "pp_size": Key(Kind.PP_SIZE, nullable=False),
    "remote_block_size": Key(Kind.COUNT),
    "remote_num_tokens": Key(Kind.COUNT),
    "remote_blocks_expiry_time": Key(Kind.SECONDS),
    "transfer_mode": Key(Kind.TEXT),
    "remote_prefill_cached_tokens": Key(Kind.COUNT),
    "prompt_token_ids": Key(Kind.DROPPED),  # popped by the renderer, renderers/online_renderer.py
}
_NIXL_PEER = Peer(host="remote_host", ports=("remote_port",), engine_id="remote_engine_id")
_NIXL_REMOTE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_NIXL_CLAIM = ("remote_engine_id", "remote_request_id")
# pull_worker.py notifies with the read itself or after all of it, and for one that failed never; prefill counts
# notifications per worker (`_get_new_notifs`). With push prefill writes, and may have begun to.
_NIXL_SOURCES = ("tp_size", "dcp_size", "pp_size")


def _nixl_load(*required: str, sources: tuple[str, ...] = ()) -> Mode:
    return Mode(
        Ask.LOAD,
        PREFILL,
        required=(*required, *_NIXL_REMOTE),
        peers=(_NIXL_PEER,),
        claim=_NIXL_CLAIM,
        sources=sources,
        blocks="remote_block_ids",
        tokens="remote_num_tokens",
        request_id="remote_request_id",
    )


_HANDOFF = Mode(Ask.HANDOFF, DECODE)

NIXL_PULL = Profile(
    "NixlPullConnector",
    keys=_NIXL_KEYS,
    # Without `remote_block_ids` pull_scheduler.py asserts; without one of the four it hangs.
    modes=(_nixl_load("remote_block_ids", sources=_NIXL_SOURCES), _HANDOFF),
    readback=Mode(
        Ask.HANDOFF,
        "remote_block_ids",
        required=(*_NIXL_REMOTE, "remote_num_tokens"),
        peers=(_NIXL_PEER,),
        claim=_NIXL_CLAIM,
        sources=_NIXL_SOURCES,
        blocks="remote_block_ids",
        tokens="remote_num_tokens",
        variant=Variant.BIDIRECTIONAL,
    ),
    flags=FLAGS,
    handoff_keys=_NIXL_REMOTE,
    # `get_num_new_matched_tokens` promises a read-back again after a preemption, a failed load, or the load
    # of a one-token prompt; `update_state_after_alloc` then queues nothing: the request waits for good.
    spent_key="_remote_blocks_processed",
    issues=True,
    issues_on_stop=True,
)
NIXL_PUSH = Profile(
    "NixlPushConnector",
    keys=_NIXL_KEYS,
    # push_scheduler.py reads `tp_size` by subscript; `remote_block_ids` it overwrites.
    modes=(_nixl_load("tp_size"), _HANDOFF),
    flags=FLAGS,
    handoff_keys=_NIXL_REMOTE,
    issues=True,
    issues_on_stop=True,
)

# --- Mooncake: mooncake/mooncake_connector.py

MOONCAKE = Profile(
    "MooncakeConnector",
    keys={
        **_FLAG_KEYS,
        "remote_engine_id": Key(Kind.IDENT),
        "remote_bootstrap_addr": Key(Kind.URL),
        "transfer_id": Key(Kind.IDENT),
        "prompt_token_ids": Key(Kind.DROPPED),
    },
    modes=(
        # Asserts on the wrong role; `bootstrap + "/query"` is outside every try.
        Mode(
            Ask.LOAD,
            PREFILL,
            required=("remote_engine_id", "remote_bootstrap_addr", "transfer_id"),
            peers=(Peer(url="remote_bootstrap_addr", engine_id="remote_engine_id"),),
            claim=("remote_engine_id", "transfer_id"),
            request_id="transfer_id",
            side=Side.CONSUMER,
        ),
        # Without `transfer_id` prefill warns, sends nothing, and its abort path raises KeyError.
        # Its sender keeps one request an id: the blocks of others under the same one are never freed.
        Mode(Ask.HANDOFF, DECODE, required=("transfer_id",), claim=("transfer_id",), side=Side.PRODUCER),
    ),
    flags=FLAGS,
    handoff_keys=("remote_engine_id", "remote_bootstrap_addr"),
)

# --- MoRIIO: moriio/{moriio_connector,moriio_common}.py

_MORIIO_PEER = Peer(
    host="remote_host",
    ports=("remote_handshake_port", "remote_notify_port"),
    engine_id="remote_engine_id",
    in_request_id=True,
)
_MORIIO_PODS = Peer(host="remote_hosts", ports=("remote_handshake_port", "remote_notify_port"))
MORIIO = Profile(
    "MoRIIOConnector",
    keys={
        **_FLAG_KEYS,
        "remote_block_ids": Key(Kind.BLOCKS),
        "remote_engine_id": Key(Kind.IDENT),
        "remote_host": Key(Kind.HOST),
        "remote_hosts": Key(Kind.HOSTS),
        "remote_handshake_port": Key(Kind.PORT),
        "remote_notify_port": Key(Kind.PORT),
        "transfer_id": Key(Kind.IDENT, nullable=False),
        "remote_dp_rank": Key(Kind.RANKS, nullable=False),
        "remote_dp_rank_override": Key(Kind.FLAG),
        "remote_dp_size": Key(Kind.RANKS, nullable=False),
        "remote_dp_size_local": Key(Kind.RANKS, nullable=False),
        "remote_tp_size": Key(Kind.TP_SIZE, nullable=False),
        "tp_size": Key(Kind.TP_SIZE, nullable=False),
        "is_request_leader": Key(Kind.FLAG),
        "prompt_token_ids": Key(Kind.DROPPED),
    },
    modes=(
        Mode(
            Ask.LOAD,
            PREFILL,
            required=("remote_block_ids", "remote_engine_id"),
            peers=(_MORIIO_PEER, _MORIIO_PODS),
            claim=("remote_engine_id", "transfer_id"),
            blocks="remote_block_ids",
            request_id="transfer_id",
            side=Side.CONSUMER,
            variant=Variant.READ,
        ),
        Mode(
            Ask.LOAD,
            PREFILL,
            peers=(_MORIIO_PEER, _MORIIO_PODS),
            claim=("remote_host", "transfer_id"),
            request_id="transfer_id",
            side=Side.CONSUMER,
            variant=Variant.WRITE,
        ),
        Mode(Ask.HANDOFF, DECODE, side=Side.PRODUCER, variant=Variant.READ),
        # Prefill writes to decode, so here it is prefill that contacts a peer.
        Mode(
            Ask.HANDOFF,
            DECODE,
            present=("remote_block_ids", "remote_engine_id"),
            peers=(_MORIIO_PEER, _MORIIO_PODS),
            side=Side.PRODUCER,
            variant=Variant.WRITE,
        ),
    ),
    flags=FLAGS,
    handoff_keys=("remote_engine_id", "remote_host", "remote_handshake_port", "remote_notify_port"),
    loads_unasked=Variant.READ,
    issues=True,
)

# --- LMCache: lmcache_connector.py, lmcache_integration/vllm_v1_adapter.py, lmcache_mp_connector.py

_DISAGG_SPEC = Key(
    Kind.RECORD,
    nullable=False,  # the adapter tests `in`, then subscripts
    fields={
        "req_id": Key(Kind.IDENT),
        "receiver_host": Key(Kind.HOST),
        "receiver_init_port": Key(Kind.PORTS),
        "receiver_alloc_port": Key(Kind.PORTS),
    },
    required=("req_id", "receiver_host", "receiver_init_port", "receiver_alloc_port"),
)
LMCACHE = Profile(
    "LMCacheConnectorV1",
    keys={"disagg_spec": _DISAGG_SPEC, "ret_first_tok": Key(Kind.ANY)},
    modes=(
        Mode(
            Ask.HANDOFF,
            "disagg_spec",
            peers=(
                Peer(
                    host="receiver_host",
                    ports=("receiver_init_port", "receiver_alloc_port"),
                    record="disagg_spec",
                ),
            ),
        ),
    ),
    params_needed=False,
    reads_extra_args=True,
    # `request._output_token_ids[0]`: IndexError for a request that generated nothing.
    fatal_without_output=("ret_first_tok",),
    issues=True,
    issues_on_stop=True,
    granule=Granule.CHUNK,
)
LMCACHE_MP = Profile(
    "LMCacheMPConnector",
    keys={"num_lmcache_extra_cached_tokens": Key(Kind.ANY)},
    params_needed=False,
    reads_extra_args=True,
    # Looks up a tracker that exists only once the request was scheduled.
    fatal_without_output=("num_lmcache_extra_cached_tokens",),
    issues=True,
    issues_on_stop=True,
    granule=Granule.CHUNK,
)

# --- Offloading and its P2P tier: offloading/scheduler.py, v1/kv_offload/tiering/p2p/manager.py

_SOURCE = Key(
    Kind.RECORD,
    fields={
        "kv_request_id": Key(Kind.IDENT),
        "remote_host": Key(Kind.HOST),
        "remote_port": Key(Kind.PORT),
    },
    required=("kv_request_id", "remote_host", "remote_port"),
)


def _source(record: str) -> Mode:
    return Mode(
        Ask.LOAD,
        record,
        peers=(Peer(host="remote_host", ports=("remote_port",), record=record),),
    )


OFFLOADING = Profile(
    "OffloadingConnector",
    keys={
        "max_load_tokens": Key(Kind.COUNT),
        "max_offload_tokens": Key(Kind.COUNT),
        "kv_load_tiers": Key(Kind.ANY),
        "remote_prefiller": _SOURCE,
        "remote_kv_source": _SOURCE,
        "remote_decoder": Key(
            Kind.RECORD, fields={"kv_request_id": Key(Kind.IDENT)}, required=("kv_request_id",)
        ),
    },
    modes=(
        _source("remote_prefiller"),
        _source("remote_kv_source"),
        Mode(Ask.HANDOFF, "remote_decoder"),
    ),
    params_needed=False,
    granule=Granule.CHUNK,
)

# --- Hidden states: example_hidden_states_connector.py

HIDDEN_STATES = Profile(
    "ExampleHiddenStatesConnector",
    keys={"hidden_states_path": Key(Kind.TEXT), "include_output_tokens": Key(Kind.ANY)},
    params_needed=False,
    reads_extra_args=True,
    issues=True,
    issues_on_stop=True,
)

# These read no params; vLLM 0.32's scheduler still calls `.get` on whatever is there.
_NO_PARAMS = (
    "DecodeBenchConnector",
    "ExampleConnector",
    "HF3FSKVConnector",
    "HiSparseConnector",
    "MooncakeStoreConnector",
    "SimpleCPUOffloadConnector",
)

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "NixlConnector": NIXL_PULL,  # the name under which vLLM registers the pull class once more
        **{
            profile.name: profile
            for profile in (NIXL_PULL, NIXL_PUSH, MOONCAKE, MORIIO, LMCACHE, LMCACHE_MP, OFFLOADING)
        },
        HIDDEN_STATES.name: HIDDEN_STATES,
        **{name: Profile(name, params_needed=False) for name in _NO_PARAMS},
    }
)
