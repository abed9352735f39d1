"""What the profiles say."""

from __future__ import annotations

import pytest

from shim.connector.profiles import PROFILES, Granule, profile_for
from shim.connector.profiles.layout import Group, GroupKind, counts_problem, layout
from shim.verdict import Ask

FULL = Group(GroupKind.FULL, 16)


@pytest.mark.parametrize("name", list(PROFILES))
def test_every_key_that_a_rule_names_is_a_key_of_the_profile(name):
    """A rule about a key that no check knows would let hostile values through."""
    profile = PROFILES[name]
    modes = [*profile.modes, *([profile.readback] if profile.readback else [])]
    named = {
        profile_key
        for mode in modes
        for profile_key in (
            mode.trigger,
            *mode.required,
            *mode.present,
            *mode.claim,
            mode.blocks,
            mode.tokens,
            mode.request_id,
        )
    }
    named |= {*profile.flags, *profile.handoff_keys, *profile.fatal_without_output}
    assert named - {""} <= set(profile.keys)
    for mode in modes:
        for peer in mode.peers:
            keys = profile.keys[peer.record].fields if peer.record else profile.keys
            assert {peer.host, peer.url, peer.engine_id, *peer.ports} - {""} <= set(keys)


@pytest.mark.parametrize("name", list(PROFILES))
def test_flags_come_load_first_and_all_modes_have_a_trigger(name):
    """The guard reads `flags` in this order."""
    profile = PROFILES[name]

    assert profile.flags in {(), ("do_remote_prefill", "do_remote_decode")}
    assert all(mode.trigger for mode in profile.modes)
    assert {m.trigger for m in profile.modes if m.ask is Ask.LOAD and profile.flags} <= {"do_remote_prefill"}


def test_both_names_of_nixl_are_one_profile():
    """vLLM registers the pull class twice."""
    assert profile_for("NixlConnector") is profile_for("NixlPullConnector")


@pytest.mark.parametrize("name", ["FlexKVConnectorV1", "my.module:Connector", ""])
def test_unknown_connectors_are_only_observed(name):
    """No rule is better than a wrong one."""
    assert not profile_for(name).known


def test_multi_is_the_union_of_its_children():
    """Children share one dict, so each one's rules hold."""
    multi = profile_for("MultiConnector", ["NixlConnector", "OffloadingConnector"])

    assert {"remote_block_ids", "remote_prefiller"} <= set(multi.keys)
    assert multi.flags
    assert multi.params_needed
    assert multi.issues_on_stop
    assert multi.granule is Granule.CHUNK
    assert multi.readback is not None


def test_multi_of_strangers_is_a_stranger():
    """A child that nobody knows adds no rules, and takes none away."""
    assert not profile_for("MultiConnector", ["FlexKVConnectorV1"]).known
    assert not profile_for("MultiConnector").known
    assert profile_for("MultiConnector", ["FlexKVConnectorV1", "NixlConnector"]).known


def count(blocks, groups=(FULL,), prompt=100, back_off=0, remote=None):
    """Why this many blocks do not fit, for a prompt of 100 tokens in blocks of 16."""
    return counts_problem(blocks, groups, prompt_tokens=prompt, backoff=back_off, remote_tokens=remote)


IDS = list(range(1000))


@pytest.mark.parametrize(
    ("blocks", "prompt", "remote"),
    [
        (7, 100, None),
        (7, 100, 100),
        (7, 100, 99),  # the last token is computed here anyway
        (7, 100, 112),  # prefill generated some tokens in the same block
        (13, 100, 100),  # prefill's blocks hold 8 tokens
        (25, 100, 100),  # 4
        (100, 100, 100),  # 1
        (1, 1, None),
        (6, 96, 96),
    ],
)
def test_block_counts_that_the_worker_pairs_rightly(blocks, prompt, remote):
    """As many blocks as the prompt fills, in the peer's block size if that divides ours."""
    assert count([IDS[:blocks]], prompt=prompt, remote=remote) == ""


@pytest.mark.parametrize(
    ("blocks", "prompt", "remote"),
    [
        (6, 100, None),  # too few: the worker asserts
        (6, 100, 100),
        (0, 100, 100),
        (8, 100, 100),  # too many: the worker takes the last, shifted by one
        (8, 100, None),
        (7, 100, 98),  # prefill's prompt was shorter
        (7, 100, 50),
        (8, 100, 113),  # prefill went on into the next block
        (7, 100, 113),
        (6, 97, 96),
        (1, 100, 100),
        (1000, 100, 100),
    ],
)
def test_block_counts_that_end_badly(blocks, prompt, remote):
    """Each of these kills the worker or pairs the wrong blocks."""
    assert count([IDS[:blocks]], prompt=prompt, remote=remote)


def test_windows_and_states_are_counted_in_their_own_way():
    """A window's blocks are capped, a state's must only be there."""
    groups = (FULL, Group(GroupKind.WINDOW, 16, 3), Group(GroupKind.OTHER, 16))

    assert count([IDS[:7], IDS[:3], IDS[:1]], groups) == ""
    assert count([IDS[:7], IDS[:2], IDS[:1]], groups)
    assert count([IDS[:7], IDS[:3], []], groups)
    assert count([IDS[:2], IDS[:2], IDS[:1]], groups, prompt=20, remote=20) == ""
    assert count([IDS[:7], IDS[:7], IDS[:1]], groups, remote=100) == ""  # smaller blocks, a longer window


def test_hybrid_models_may_have_blocks_of_another_size():
    """There the state decides on the size, and with it the number of ranks."""
    groups = (FULL, Group(GroupKind.STATE, 16))

    assert count([IDS[:7], [1]], groups, back_off=1, remote=99) == ""
    assert count([IDS[:4], [1]], groups, back_off=1, remote=99) == ""
    assert count([IDS[:7], []], groups, back_off=1, remote=99)
    assert count([IDS[:4], [1]], groups, back_off=1, remote=200)


def test_without_groups_only_tokens_are_counted():
    """What can't be told is not refused."""
    assert count([IDS[:3], IDS[:90]], None) == ""
    assert count([IDS[:3]], None, remote=50)
    assert count([[], []], None)


class KVCacheSpec:
    block_size = 16


class FullAttentionSpec(KVCacheSpec):
    pass


class SlidingWindowSpec(KVCacheSpec):
    sliding_window = 40


class MambaSpec(KVCacheSpec):
    pass


class ChunkedLocalAttentionSpec(KVCacheSpec):
    pass


class KVCacheGroup:
    def __init__(self, spec):
        self.kv_cache_spec = spec


class Config:
    def __init__(self, *specs, transferred=None):
        self.kv_cache_groups = [KVCacheGroup(spec) for spec in specs]
        if transferred is not None:
            self.transfer_groups = self.kv_cache_groups[:transferred]


def test_a_layout_is_read_by_class_name():
    """Specs are vLLM's, so they are told apart without importing them."""
    groups = layout(
        Config(FullAttentionSpec(), SlidingWindowSpec(), MambaSpec(), ChunkedLocalAttentionSpec()), 32
    )

    assert groups == (
        Group(GroupKind.FULL, 32),
        Group(GroupKind.WINDOW, 16, 4),
        Group(GroupKind.STATE, 32),
        Group(GroupKind.OTHER, 32),
    )


def test_only_groups_that_are_transferred_count():
    """vLLM 0.32 leaves some groups out of hand-offs."""
    assert layout(Config(FullAttentionSpec(), FullAttentionSpec(), transferred=1), 16) == (FULL,)
    assert layout(None, 16) is None
