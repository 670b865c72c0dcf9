"""How many processes are connected to a store: this one, as the kernel lists it."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from zero_compiler.ranks.store_clients import clients_of


def test_this_process_is_the_only_client_of_its_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=20))
    assert clients_of(store) in (1, None)  # None where the kernel does not show whose a connection is
    assert clients_of(dist.PrefixStore("below", store)) == clients_of(store)


def test_other_stores_have_no_connections_to_count():
    assert clients_of(dist.HashStore()) is None
