"""Places of activations, and transfers that break off."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zero_compiler.errors import StorageError
from zero_compiler.ir.transfers import OffloadDesc
from zero_compiler.runtime.activation_offload import ActivationFiles
from zero_compiler.runtime.model import ModelRuntime
from zero_compiler.runtime.pools import Pools
from zero_compiler.storage.activation_store import Parcels


def test_each_frame_finds_the_place_that_was_made_for_it():
    made = []

    def make(nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    parcels = Parcels(make)
    for nbytes in (10, 100):  # before the first step
        parcels.reserve(nbytes)
    for _ in range(3):
        small, large = parcels.take(10), parcels.take(100)
        assert (small.place.nbytes, large.place.nbytes) == (10, 100)
        del large  # whose backward comes first
        del small
    assert made == [10, 100]


class Request:
    """A transfer whose first wait breaks off with ``error``; the transfer goes on."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self.over = False

    def wait(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.over = True


class Engine:
    def __init__(self, request: Request) -> None:
        self.request = request

    def settle(self) -> None:
        self.request.over = True


class File:
    nbytes = 4096

    def __init__(self, request: Request) -> None:
        self.request, self.engine = request, Engine(request)

    def write(self, span, buffer):
        return self.request

    read = write


@pytest.mark.parametrize("what", ["offload", "restore"])
def test_a_wait_that_breaks_off_leaves_nothing_under_way(what):
    """Ctrl-C ends a wait and not the transfer, which must not run into what the pool holds next."""
    request = Request(KeyboardInterrupt())
    parcels, pool = Parcels(lambda nbytes: File(request)), torch.zeros(4096, dtype=torch.uint8)
    desc = OffloadDesc("a", "h.0", ("nvme",), (1024,), (1,), "float32", 0, 0)
    files = ActivationFiles(parcels, [desc], 4096, lambda: pool)
    parcel = parcels.take(4096)
    if what == "offload":
        files.offload(0, torch.ones(1024))
    else:
        files.restore(0, parcel.ticket())
    with pytest.raises(KeyboardInterrupt):
        files.wait(0)
    files.end()
    assert request.over


def test_a_transfer_that_failed_is_waited_for_once():
    request = Request(StorageError("the disk is gone"))
    parcels, pool = Parcels(lambda nbytes: File(request)), torch.zeros(4096, dtype=torch.uint8)
    desc = OffloadDesc("a", "h.0", ("nvme",), (1024,), (1,), "float32", 0, 0)
    files = ActivationFiles(parcels, [desc], 4096, lambda: pool)
    files.offload(0, torch.ones(1024))
    with pytest.raises(StorageError):
        files.wait(0)
    files.end()
    with pytest.raises(KeyError):
        files.wait(0)


def test_places_go_with_the_model():
    places = []

    def make(nbytes: int) -> torch.Tensor:
        places.append(torch.empty(nbytes, dtype=torch.uint8))
        return places[-1]

    parcels = Parcels(make)
    parcels.reserve(10)
    first, second = parcels.take(10), parcels.take(10)
    del first
    assert parcels._idle == [places[0]]
    parcels.close()
    assert parcels._idle == []
    del second  # a graph that outlived its model
    assert parcels._idle == []


def test_all_copies_of_a_model_share_one_stream(monkeypatch):
    """Else a place that a broken call gave back could be filled before the copy that is under way there ends."""
    streams = []
    monkeypatch.setattr(torch, "Stream", lambda device: streams.append(device) or object())
    tiers = SimpleNamespace(activation_path=("host",))
    sharded_model = SimpleNamespace(tiers=tiers, group=SimpleNamespace(device=torch.device("cuda")))
    pools = Pools(torch.device("cuda"))
    runtime = SimpleNamespace(sharded_model=sharded_model, parcels=Parcels(torch.empty), pools=pools)
    program = SimpleNamespace(phase="backward", offloads=[], file_bytes=0)
    first, second = (ModelRuntime.moves(runtime, program) for _ in range(2))
    assert first._stream is second._stream is pools.aside._stream
    assert streams == [torch.device("cuda")]
    runtime.pools = Pools(torch.device("cuda"))  # with those of another model
    assert first._stream is second._stream is runtime.pools.aside._stream
