"""Tensors that count their writes together, storages that are given other memory, and what a call of a compiled frame
or a step of an optimizer does for every parameter and value."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zero_compiler as zero
from zero_compiler import torch_cpp
from zero_compiler.sharded import parameter_errors


def _params(model: nn.Module) -> tuple[DTensor, ...]:
    return tuple(zero.shard(model, stage=3, device="cpu").parameters())  # type: ignore[arg-type]


def test_autograd_notices_a_write_to_the_other():
    saved, other = torch.ones(3), torch.ones(3)
    torch_cpp.share_version_counters([saved], [other])
    loss = (torch.ones(3, requires_grad=True) * saved).sum()
    other.add_(1)
    assert saved._version == other._version == 1
    assert torch.equal(saved, torch.ones(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_storage_moves_with_all_that_looks_at_it():
    under = bytearray(16)
    tensor = torch.frombuffer(under, dtype=torch.float32)
    tensor.copy_(torch.arange(4.0))
    at = tensor.data_ptr()
    assert not torch_cpp.move_if_shared(tensor)
    assert tensor.data_ptr() == at
    rows = tensor.view(2, 2)[1:]
    assert torch_cpp.move_if_shared(tensor)
    assert tensor.data_ptr() != at
    assert rows.data_ptr() == tensor.data_ptr() + 8
    torch.frombuffer(under, dtype=torch.float32).zero_()
    assert rows.tolist() == [[2.0, 3.0]]
    with pytest.raises(RuntimeError, match="a storage on meta"):
        torch_cpp.move_if_shared(torch.empty(1, device="meta"))


def test_values_are_taken_put_and_dropped_by_number():
    values: list[object] = ["a", "b", None, None]
    assert torch_cpp.Values([1, 0, 1]).take(values) == ["b", "a", "b"]
    torch_cpp.Values([3, -1]).put(values, ("c", "nobody reads it"))
    torch_cpp.Values([0]).drop(values)
    assert values == [None, "b", None, "c"]
    with pytest.raises(IndexError, match="no value 4"):
        torch_cpp.Values([4]).take(values)
    with pytest.raises(ValueError, match="1 values for 2 places"):
        torch_cpp.Values([0, 1]).put(values, ["a"])


def test_what_a_destroyed_value_does_to_the_lists_is_found():
    """Its destructor runs while values are put in its place."""
    values: list[object] = []
    given: list[object] = ["a", "b"]

    class Clears:
        def __init__(self, what: list[object]) -> None:
            self.what = what

        def __del__(self) -> None:
            self.what.clear()

    values += [Clears(given), None]
    with pytest.raises(IndexError):
        torch_cpp.Values([0, 1]).put(values, given)
    assert values == ["a", None]
    values[:] = [Clears(values), None]
    with pytest.raises(IndexError):
        torch_cpp.Values([0, 1]).drop(values)
    assert values == []


def test_an_error_of_a_segment_is_its_own():
    def segment(args: list[object]) -> list[object]:
        raise KeyError(args[0])

    values: list[object] = ["a", None]
    with pytest.raises(KeyError, match="a"):
        torch_cpp.SegmentCall(segment, [0], [1], [0])(values)
    assert values == [None, None]


def test_a_segment_is_the_last_to_hold_what_it_reads_last():
    values: list[object] = [torch.ones(2), torch.ones(2), None]

    def segment(args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        a, b = args
        args.clear()
        assert values[1] is None
        assert values[0] is a
        return [a + b]

    torch_cpp.SegmentCall(segment, [0, 1], [2], [1])(values)
    assert torch.equal(values[2], torch.full((2,), 2.0))  # type: ignore[arg-type]


def test_autograd_notices_a_write_to_the_parameter_of_rows():
    params = _params(nn.Linear(3, 2))
    rows, frozen = torch_cpp.local_rows(params)
    assert frozen == []
    saved = rows[1]
    loss = (torch.ones(2, requires_grad=True) * saved).sum()
    with torch.no_grad():
        params[1].add_(1)
    assert saved._version == params[1]._version == 1
    assert torch.equal(saved, params[1].to_local())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    params[0].requires_grad_(False)
    rows, frozen = torch_cpp.local_rows(params)
    assert [f is rows[0] for f in frozen] == [True]


def test_the_first_parameter_that_changed_is_found():
    model = nn.Linear(3, 2)
    params = _params(model)
    places = [[(model, "weight")], [(nn.Linear(3, 2), "bias"), (model, "bias")]]
    versions = torch_cpp.Versions(params)
    assert versions.first_changed(params, places) == -1
    with torch.no_grad():
        params[1].zero_()
    assert versions.first_changed(params, places) == 1
    assert versions.of(1) + 1 == params[1]._version
    model.weight = nn.Parameter(params[0].detach())
    assert versions.first_changed(params, places) == 0


def test_a_chunk_stands_where_it_stood_until_it_is_elsewhere():
    model = nn.Linear(3, 2)
    weight, _ = _params(model)
    local = weight._local_tensor
    chunk = weight, local, local.data_ptr(), [(model, "weight")]
    assert torch_cpp.all_stand([chunk])
    local.data = local.clone()
    assert not torch_cpp.all_stand([chunk])
    chunk = weight, local, local.data_ptr(), [(model, "weight")]
    assert torch_cpp.all_stand([chunk])
    model.weight = nn.Parameter(weight.detach())
    assert not torch_cpp.all_stand([chunk])


def test_gradients_are_set_where_there_is_neither_one_nor_a_hook():
    params = _params(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False)))
    given = tuple(torch.full(p.to_local().shape, 2.0) for p in params)
    params[0].register_hook(lambda grad: None)
    params[1].grad = params[1].detach().clone()
    params[2].requires_grad_(False)
    params[3].register_post_accumulate_grad_hook(lambda param: None)
    assert torch_cpp.set_gradients(params, given, DTensor) == [0, 1, 2, 3]
    assert [p.grad is None for p in params] == [True, False, True, True, False]
    grad = params[4].grad
    assert type(grad) is DTensor
    assert grad._local_tensor is given[4]
    assert grad._spec is params[4]._spec
    assert torch_cpp.set_gradients(params, (None,) * 5, DTensor) == []


def test_a_gradient_of_another_form_is_refused_as_torch_does():
    weight, bias = _params(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="dtype"):
        torch_cpp.set_gradients((weight, bias), (None, torch.ones(2, dtype=torch.float64)), DTensor)
    assert bias.grad is None
    with pytest.raises(ValueError, match="1 gradients for 2 parameters"):
        torch_cpp.set_gradients((weight, bias), (None,), DTensor)
    with pytest.raises(TypeError, match="a tensor was expected, not str"):
        torch_cpp.all_contiguous(["no tensor"])  # type: ignore[list-item]


def test_rows_are_the_beginning_of_chunks():
    rows = torch_cpp.Rows([((2, 2), (2, 1)), ((3,), (1,))])
    chunks = [torch.arange(6.0), torch.arange(3.0)]
    first, second = rows.of(chunks)
    assert torch.equal(first, torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    assert second is chunks[1]
    with pytest.raises(ValueError, match="1 chunks, not 2"):
        rows.of(chunks[:1])


def test_contiguous_lists():
    assert torch_cpp.all_contiguous([torch.ones(2, 3), torch.ones(1)])
    assert not torch_cpp.all_contiguous([torch.ones(1), torch.ones(2, 3).t()])


@pytest.mark.parametrize(("inputs", "all_of_them"), [(False, True), (True, False)])
def test_whether_a_backward_was_given_inputs(inputs, all_of_them):
    x, seen = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda grad: seen.append(torch_cpp.backward_runs_all()))
    y.sum().backward(inputs=[x] if inputs else None)
    assert seen == [all_of_them]
    assert not torch_cpp.backward_runs_all()


def test_attributes_of_some_parameters_are_found():
    plain, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    assert not torch_cpp.some_have([plain, other], ("mark", "other"))
    other.__dict__["other"] = None
    assert torch_cpp.some_have([plain, other], ("mark", "other"))


def test_a_parameter_that_was_given_another_storage_is_found():
    model = nn.Linear(3, 2)
    weight, bias = _params(model)
    assert not parameter_errors.any_was_dropped([weight, bias, torch.ones(1)])
    assert not parameter_errors.any_was_dropped([copy.deepcopy(bias)])
    bias.data = bias.detach() + 1
    assert parameter_errors.was_dropped(bias)
    assert parameter_errors.any_was_dropped([weight, bias])


def test_writes_count_where_the_mark_is():
    weight, bias = _params(nn.Linear(3, 2))
    weight.__dict__["mark"] = True
    plain = torch.ones(1)
    assert torch_cpp.count_written([weight, plain, bias], "mark", DTensor) == [bias]
    assert [weight._version, plain._version, bias._version] == [1, 0, 0]


def test_rows_of_lists_that_lie_alike():
    params = _params(nn.Linear(3, 2))
    states = [p.detach().clone() for p in params]
    steps = [torch.tensor(1.0), torch.tensor(2.0)]
    rows = torch_cpp.rows_alike((list(params), states, [], steps), DTensor)
    assert rows is not None
    assert rows[2] == []
    for got, want in zip(rows[0] + rows[1] + rows[3], [*params, *states, *steps], strict=True):
        assert got is (want._local_tensor if isinstance(want, DTensor) else want)
    whole = [p.to_local() for p in params]  # no DTensors
    shorter = [params[0].detach(), params[1].detach()[:1]]
    for other in (whole, shorter, states[:1]):
        assert torch_cpp.rows_alike((list(params), other), DTensor) is None
