"""How many processes are connected to a store: this one, as the kernel lists it."""

from __future__ import annotations

import datetime
import os

import pytest
import torch.distributed as dist

from zero_compiler.ranks.store_clients import clients_of


def test_this_process_is_the_only_client_of_its_store():
    below = [open(os.devnull) for _ in range(3)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=20))
    if clients_of(store) is None:
        pytest.skip("the kernel does not show whose a connection is")
    assert clients_of(store) == 1
    assert clients_of(dist.PrefixStore("below", store)) == 1
    for file in below:
        file.close()
    # What lists the files of this process is one of them, of a number below that of the connection, and closed at once.
    assert clients_of(store) == 1


def test_other_stores_have_no_connections_to_count():
    assert clients_of(dist.HashStore()) is None
