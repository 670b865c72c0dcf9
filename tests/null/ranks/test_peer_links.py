"""Connections between processes: whole messages in order, in whatever pieces they come, and an end that is told."""

from __future__ import annotations

import json
import socket

import pytest

from zero_compiler.ranks.peer_links import PeerLink


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    yield PeerLink(one, 0), other
    one.close()
    other.close()


def test_messages_come_whole_and_in_order(pair):
    link, other = pair
    text = b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(3))
    other.sendall(text[:5])
    assert link.receive() == []
    other.sendall(text[5:])
    assert link.receive() == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_what_is_sent_is_a_line_each(pair):
    link, other = pair
    link.send({"rank": 1})
    link.send({"rank": 2})
    assert [json.loads(line) for line in other.recv(1 << 16).splitlines()] == [{"rank": 1}, {"rank": 2}]


def test_a_connection_that_has_ended_is_told_after_its_last_message(pair):
    link, other = pair
    other.sendall(b"{}\n")
    other.close()
    assert link.receive() == [{}]
    with pytest.raises(EOFError):
        link.receive()


def test_the_last_message_before_a_reset_is_read():
    """A process that closes a connection of which it has not read everything resets it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        link = PeerLink(server.accept()[0], 0)
    link.send({"silent": []})
    other.sendall(b'{"left": "it has destroyed the process group"}\n')
    other.close()
    assert link.receive() == [{"left": "it has destroyed the process group"}]
    with pytest.raises(EOFError):
        link.receive()
    link.socket.close()


def test_a_message_that_never_ends_is_not_kept(pair):
    link, other = pair
    other.setblocking(False)

    def endless():
        for _ in range(1 << 10):
            other.send(b"x" * (1 << 14))
            link.receive()

    with pytest.raises(EOFError, match="no message of ours is so long"):
        endless()
