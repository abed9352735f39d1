"""NIXL's real handshake listener, over real sockets, under junk."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.utils.network_utils import get_open_port

from shim.connector.listener import defend

GOOD = msgspec.msgpack.encode((GET_META_MSG, 0, 0))
JUNK = {
    "no msgpack": b"\xc1\xff",
    "empty": b"",
    "too few": msgspec.msgpack.encode((GET_META_MSG, 0)),
    "an unknown rank": msgspec.msgpack.encode((GET_META_MSG, 0, 9)),
    "a rank that is a list": msgspec.msgpack.encode((GET_META_MSG, [0], 0)),
    "a number": msgspec.msgpack.encode(7),
}


def ask(port: int, message: bytes, wait: float = 4.0) -> list[bytes] | None:
    """Send one message as decode does; None if there is no answer."""
    with zmq.Context() as context, context.socket(zmq.REQ) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.RCVTIMEO, int(wait * 1000))
        sock.connect(f"tcp://127.0.0.1:{port}")
        sock.send(message)
        try:
            return sock.recv_multipart()
        except zmq.Again:
            return None


@pytest.fixture(params=[True, False], ids=["defended", "bare"])
def listener(request: pytest.FixtureRequest) -> Iterator[tuple[bool, int]]:
    """vLLM's listener on a free port, with and without the shim's defence."""
    # The real class without its constructor, which wants a model; the listener uses nothing of it.
    # A subclass, so that the defence does not outlive the test.
    scheduler = object.__new__(type("OneTest", (NixlBaseConnectorScheduler,), {}))
    if request.param:
        defend(SimpleNamespace(_connectors=[SimpleNamespace(connector_scheduler=scheduler)]))
    ready, stop, port = threading.Event(), threading.Event(), get_open_port()
    thread = threading.Thread(
        target=scheduler._nixl_handshake_listener,
        args=({(0, 0): b"metadata"}, ready, stop, "127.0.0.1", port),
        daemon=True,
    )
    thread.start()
    assert ready.wait(10)
    yield request.param, port
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("junk", JUNK)
def test_a_message_that_ends_the_bare_listener_does_not_end_ours(listener: tuple[bool, int], junk: str) -> None:
    """The next decode server still gets its handshake; bare, it never does: the defect is real."""
    defended, port = listener
    assert ask(port, GOOD)[0] == b"metadata"  # type: ignore[index]
    ask(port, JUNK[junk], wait=0.5)
    answer = ask(port, GOOD, wait=4.0 if defended else 1.0)
    assert (answer is not None and answer[0] == b"metadata") is defended
