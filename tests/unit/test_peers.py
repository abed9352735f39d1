"""Which peers may be contacted, and when."""

from __future__ import annotations

import pytest

from shim.config import SettingsError
from shim.connector.peers import (
    BACK_OFF,
    FORGET_AFTER,
    MAX_BACK_OFF,
    MAX_PEERS,
    THRESHOLD,
    AllowList,
    Breakers,
    parse_host,
    parse_url,
)
from shim.telemetry.catalog import PeerState
from shim.verdict import PeerKey


@pytest.mark.parametrize(
    "text",
    ["10.0.0.1", "::1", "[::1]", "fe80::1%eth0", "localhost", "prefill-0.svc.cluster.local", "a_b", "x."],
)
def test_plain_hosts_are_read(text):
    """Names and addresses in their usual spelling are hosts."""
    assert parse_host(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.1",
        "0177.0.0.1",
        "2130706433",
        "0x7f.0.0.1",
        "0x7f000001",
        "127.0.0.0x1",
        "1.2.3.4.5",
        "a b",
        "a/b",
        "user@host",
        "-oProxyCommand",
        "host:5600",
        "hôst",
        "x" * 300,
        "a\n",
        "[::1",
        "1.2.3.",
        "::ffff:10.0.0.5%1:0;169.254.169.254",
        "::ffff:10.0.0.5%eth0",
        "fd00::1%;10.0.0.1",
        "fd00::1%a:b",
        "fd00::1%a/b",
        "fd00::1%a]",
        "fd00::1%a\r\nb",
        "fd00::1%a\x1b",
        "fd00::1%" + "x" * 16,
        "fd00::1%",
        "[fd00::1%;x]",
    ],
)
def test_other_spellings_of_hosts_are_refused(text):
    """What the C library would read as some address must not pass as a name."""
    assert parse_host(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "ff02::1",
        "fe80::1",
        "[fe80::1]",
    ],
)
def test_without_a_list_special_addresses_are_refused(text):
    """The cloud's metadata service is no peer, however it is written."""
    assert not AllowList().allows(text, 5600)


@pytest.mark.parametrize("text", ["10.0.0.1", "127.0.0.1", "::1", "prefill-0"])
def test_without_a_list_other_peers_are_allowed(text):
    """A fleet without a list keeps working."""
    assert AllowList().allows(text, 5600)


@pytest.mark.parametrize(
    ("entry", "allowed", "refused"),
    [
        ("10.0.0.0/8", [("10.1.2.3", 1), ("::ffff:10.1.2.3", 1)], [("11.0.0.1", 1), ("ten", 1)]),
        ("10.0.0.0/8:5600-5610,7000", [("10.1.2.3", 5605), ("10.1.2.3", 7000)], [("10.1.2.3", 5611)]),
        (
            "prefill-0:5600",
            [("prefill-0", 5600), ("PREFILL-0.", 5600)],
            [("prefill-0", 1), ("prefill-01", 5600)],
        ),
        ("[fd00::/8]:5600", [("fd00::1", 5600)], [("fd00::1", 5601), ("fc00::1", 5600)]),
        ("fd00::1", [("fd00::1", 9), ("[fd00::1]", 9)], [("fd00::2", 9)]),
        ("0.0.0.0/0", [("8.8.8.8", 1)], [("169.254.169.254", 1), ("224.0.0.1", 1), ("0.0.0.0", 1)]),
        ("169.254.0.0/16", [("169.254.1.1", 1)], [("10.0.0.1", 1)]),
    ],
)
def test_a_list_allows_what_it_names_and_nothing_else(entry, allowed, refused):
    """Entries match addresses by network and names exactly, with their ports."""
    peers = AllowList([entry])

    assert all(peers.allows(*peer) for peer in allowed)
    assert not any(peers.allows(*peer) for peer in refused)


def test_an_answer_does_not_depend_on_what_was_asked_before():
    """Remembered answers are those of the same host and port."""
    peers = AllowList(["10.0.0.1:1"])

    assert [peers.allows("10.0.0.1", port) for port in (1, 2, 1, 2)] == [True, False, True, False]
    for i in range(3000):
        peers.allows(f"host-{i}", 1)
    assert len(peers._seen) <= 1024


@pytest.mark.parametrize(
    ("entry", "tells"),
    [
        ("10.0.0.1/8", "10.0.0.0/8"),
        ("host:99999", "1 to 65535"),
        ("host:9-1", "lower first"),
        ("host:x", "port 'x'"),
        ("[::1", "bracket"),
        ("127.1", "no host name"),
        ("http://x", "port '//x'"),
        ("", "no host name"),
    ],
)
def test_a_bad_entry_stops_the_start_and_says_what_to_do(entry, tells):
    """The error names the setting, the entry, and the way out."""
    with pytest.raises(SettingsError, match="allow_peers") as error:
        AllowList([entry])

    assert tells in str(error.value)


@pytest.mark.parametrize(
    ("url", "peer"),
    [
        ("http://127.0.0.1:8998", ("127.0.0.1", 8998)),
        ("https://boot.svc", ("boot.svc", 443)),
        ("http://[::1]:80/x", ("::1", 80)),
        ("http://boot", ("boot", 80)),
    ],
)
def test_peers_urls_are_read(url, peer):
    """A bootstrap URL gives a host and a port."""
    assert parse_url(url) == peer


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h:1",
        "http://u:p@h:1",
        "http://h:1?x=",
        "http://h:1#f",
        "http://127.1:80",
        "//h:1",
        "h:1",
        "http://",
        "http://h:99999",
        "http://h:0",
        "http://h\\@g",
        "http://h:1/ x",
        "file:///etc/passwd",
        "http://[::1",
        "x" * 600,
    ],
)
def test_other_urls_are_refused(url):
    """Only plain http(s) URLs of a host and a port are peers."""
    assert parse_url(url) is None


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


PEER = PeerKey("h", 1, "e")


@pytest.fixture
def clock():
    """Time that goes on when told to."""
    return Clock()


@pytest.fixture
def moves():
    """Transitions, in order."""
    return []


@pytest.fixture
def breakers(clock, moves):
    """Breakers that report to `moves`."""
    return Breakers(clock, lambda key, to: moves.append((key, to)))


def fail(breakers, times=THRESHOLD, peer=PEER):
    """Failures in a row."""
    for _ in range(times):
        breakers.failed(peer)


def test_a_breaker_opens_after_failures_in_a_row(breakers, moves):
    """One failure less than the threshold changes nothing."""
    fail(breakers, THRESHOLD - 1)
    assert breakers.allowed(PEER)

    breakers.failed(PEER)
    assert not breakers.allowed(PEER)
    assert breakers.blocked(PEER)
    assert moves == [(PEER, "open")]
    assert breakers.counts() == {PeerState.OPEN: 1, PeerState.HALF_OPEN: 0}


def test_any_success_resets(breakers, moves):
    """Failures count only in a row, and a success closes an open breaker."""
    fail(breakers, THRESHOLD - 1)
    breakers.succeeded(PEER)
    fail(breakers, THRESHOLD - 1)
    assert breakers.allowed(PEER)

    fail(breakers, 1)
    breakers.succeeded(PEER)
    assert breakers.allowed(PEER)
    assert [to for _, to in moves] == ["open", "closed"]
    assert len(breakers) == 0


def test_after_the_back_off_there_is_one_trial(breakers, clock, moves):
    """Half open lets one request through, and its success closes the breaker."""
    fail(breakers)
    clock.now += BACK_OFF

    assert not breakers.blocked(PEER)
    assert breakers.allowed(PEER)
    assert not breakers.allowed(PEER)
    assert breakers.blocked(PEER)
    breakers.succeeded(PEER)
    assert breakers.allowed(PEER)
    assert [to for _, to in moves] == ["open", "half_open", "closed"]


def test_each_failed_trial_doubles_the_back_off_up_to_a_limit(breakers, clock):
    """A peer that stays away is asked ever less, but at least once a minute."""
    fail(breakers)
    waits = []
    for _ in range(5):
        start = clock.now
        while not breakers.allowed(PEER):
            clock.now += 1
        waits.append(clock.now - start)
        breakers.failed(PEER)

    assert waits == [BACK_OFF, 20, 40, MAX_BACK_OFF, MAX_BACK_OFF]


def test_a_trial_that_never_reports_does_not_block_the_peer_for_good(breakers, clock):
    """A trial may be aborted, or find all of its prompt cached."""
    fail(breakers)
    clock.now += BACK_OFF
    assert breakers.allowed(PEER)

    clock.now += MAX_BACK_OFF
    assert breakers.allowed(PEER)


def test_a_restarted_peer_starts_afresh(breakers):
    """A new engine id at the same address is another peer."""
    fail(breakers)

    assert breakers.allowed(PEER._replace(engine_id="new"))


def test_peers_are_forgotten(breakers, clock, moves):
    """Ten minutes without use end a breaker."""
    fail(breakers)
    clock.now += FORGET_AFTER
    breakers.expire()

    assert len(breakers) == 0
    assert [to for _, to in moves] == ["open", "forgotten"]
    assert breakers.allowed(PEER)


def test_old_failures_do_not_count(breakers, clock):
    """A failure every ten minutes opens nothing."""
    for _ in range(THRESHOLD * 2):
        breakers.failed(PEER)
        clock.now += FORGET_AFTER

    assert breakers.allowed(PEER)


def test_a_thousand_peers_are_the_most(breakers):
    """Clients name peers, so there is a bound."""
    for i in range(MAX_PEERS * 2):
        breakers.failed(PeerKey("h", 1, str(i)))

    assert len(breakers) == MAX_PEERS
