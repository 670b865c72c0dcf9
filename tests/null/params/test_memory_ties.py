"""Tensors that are tied by their memory are refused by ``zero.shard``; views that do not overlap are not."""

import pytest
import torch
from torch import nn

import zero_compiler as zero
from zero_compiler.errors import ShardError


class Two(nn.Module):
    def __init__(self, a, b, buffer=None):
        super().__init__()
        self.a, self.b = a, b
        self.register_buffer("ref", buffer)


def transposed():
    weight = nn.Parameter(torch.zeros(4, 4))
    return Two(weight, nn.Parameter(weight.t()))


def sliced():
    flat = torch.zeros(12, 4)
    return Two(nn.Parameter(flat[:5]), nn.Parameter(flat[3:8], requires_grad=False))


def buffered():
    weight = nn.Parameter(torch.zeros(4))
    return Two(weight, nn.Parameter(torch.zeros(2)), weight.data[1:])


def inside_a_large_one():
    flat = torch.zeros(12, 4)
    # Between the two that overlap lies one that is frozen, and overlaps only the frozen one.
    return Two(
        nn.Parameter(flat.view(-1)[:40]),
        nn.ParameterList([nn.Parameter(flat[k : k + 1], requires_grad=k > 5) for k in (1, 9, 10)]),
        flat[2:3],
    )


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (transposed, "parameter a and parameter b"),
        (sliced, "parameter a and parameter b"),
        (buffered, "parameter a and buffer ref"),
        (inside_a_large_one, "parameter a and parameter b.0"),
    ],
)
def test_memory_in_common_is_refused(make, names):
    with pytest.raises(ShardError, match=f"{names} lie in the same memory.*b.weight = a.weight.*clone"):
        zero.shard(make(), device="cpu")


def beside_each_other():
    flat = torch.zeros(12, 4)
    return Two(nn.Parameter(flat[:5]), nn.Parameter(flat[5:8]), flat[8:])


def frozen():
    weight = nn.Parameter(torch.zeros(4), requires_grad=False)
    return Two(weight, nn.Parameter(weight.data, requires_grad=False), weight.data)


def one_parameter():
    weight = nn.Parameter(torch.zeros(4, 4))
    return Two(weight, weight)


def columns():
    flat = torch.zeros(4, 4)
    return Two(nn.Parameter(flat[:, :2]), nn.Parameter(flat[:, 2:]))


def no_memory():
    return Two(nn.Parameter(torch.zeros(4, device="meta")), nn.Parameter(torch.zeros(0)), torch.zeros(0))


@pytest.mark.parametrize(
    "make", [beside_each_other, frozen, one_parameter, columns, no_memory, lambda: nn.LSTM(3, 4, 2)]
)
def test_memory_that_is_not_common_is_fine(make):
    zero.shard(make(), device="cpu")


def test_weights_of_a_mapped_file_are_fine(tmp_path):
    from safetensors.torch import load_file, save_file

    made = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    zero.shard(model, device="cpu")
