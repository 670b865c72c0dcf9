"""What a weight travels in: what was asked for, unless it does not pay, nothing is sent, or ranks have decided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from null.instructions import spec_of

from zero_compiler.config import Config
from zero_compiler.layout import Layout
from zero_compiler.sharded.agreed_choices import AgreedChoices
from zero_compiler.sharded.gather_wire import Gathered, wire_of
from zero_compiler.sharded.managed_parameters import ParamInfo


def wire(asked="int8", shared=False, shape=(1024, 1024), **quantised):
    layout = Layout(shape, torch.float32, 2, True)
    model = SimpleNamespace(
        config=Config(gather_dtype=asked),
        hardware=spec_of(bytes_per_us=10.0),
        agreed=AgreedChoices(quantised=quantised),
        storage=SimpleNamespace(transport=SimpleNamespace(shared=shared)),
        params={"w": ParamInfo("w", layout, torch.float32, torch.float32)},
    )
    return wire_of(cast(Gathered, model), "w")


def test_it_is_what_was_asked_for():
    assert wire() is torch.int8
    assert wire("float8_e4m3fn") is torch.float8_e4m3fn
    assert wire(None) is None


def test_it_is_none_where_that_does_not_pay_or_ranks_share_memory():
    assert wire(shape=(1024,)) is None
    assert wire(shared=True) is None


def test_it_is_what_ranks_have_decided():
    assert wire(w=True) is torch.int8
    assert wire(w=False) is None
    assert wire(other=False) is torch.int8
