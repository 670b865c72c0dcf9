"""Ways in which a forward gets at its weights: each is a function of a model and its input."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Form = Callable[[Any, torch.Tensor], torch.Tensor]
FORMS: dict[str, Form] = {}


class Weights(nn.Module):
    """Weights of one shape in containers, layers and an attribute; ``form`` is the forward."""

    def __init__(self, form: Form, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)

        def weight() -> nn.Parameter:
            return nn.Parameter(torch.randn(4, 4) * 0.4)

        self.form = form
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.own = weight()
        self.list = nn.ParameterList(weight() for _ in range(3))
        self.dict = nn.ParameterDict({"x": weight(), "y": weight()})
        self.nested = nn.ParameterList([nn.ParameterList([weight(), weight()]), weight()])
        if tied:
            self.b.weight = self.a.weight
            self.dict["x"] = self.own
            self.list[2] = self.list[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(self, x)


def through(x: torch.Tensor, weights: Any) -> torch.Tensor:
    for w in weights:
        x = torch.tanh(x @ w)
    return x


def form(make: Form) -> Form:
    FORMS[make.__name__] = make
    return make


@form
def applied_if_a_parameter(m, x):
    for w in (m.own, m.a.weight, m.b.weight, m.list[0], m.dict["x"]):
        if isinstance(w, nn.Parameter):
            x = torch.tanh(x @ w)
    return x


@form
def all_of_a_list(m, x):
    return through(x, m.list[:])


@form
def part_of_a_list(m, x):
    return through(x, m.list[1:])


@form
def a_new_list(m, x):
    return through(x, nn.ParameterList([m.own, m.a.weight, m.b.weight]))


@form
def a_list_of_a_list(m, x):
    return through(x, nn.ParameterList(m.list))


@form
def a_list_that_grows(m, x):
    made = m.list[:1]
    made.append(m.own)
    made.extend(m.list)
    made += [m.a.weight]
    return through(x, made)


@form
def lists_in_a_list(m, x):
    return through(x, [*m.nested[:][0], m.nested[1]])


@form
def a_new_dict(m, x):
    return through(x, nn.ParameterDict({"p": m.own, "q": m.a.weight}).values())


@form
def a_copied_dict(m, x):
    return through(x, m.dict.copy().values())


@form
def a_united_dict(m, x):
    return through(x, (m.dict | nn.ParameterDict({"z": m.a.weight})).values())


@form
def an_updated_dict(m, x):
    made = nn.ParameterDict()
    made.update(m.dict)
    made.setdefault("z", m.own)
    return through(x, [w for _, w in made.items()])


@form
def a_dict_of_an_ordered_one(m, x):
    return through(x, nn.ParameterDict(OrderedDict((str(i), w) for i, w in enumerate(m.list))).values())


@form
def a_parameter_around_one(m, x):
    """It shares the values, and takes the gradient to itself."""
    return x @ nn.Parameter(m.own) + x @ m.a.weight


@form
def a_copied_layer(m, x):
    return copy.copy(m.a)(x)


@form
def a_copied_model(m, x):
    other = copy.copy(m)
    return through(x, [other.own, *other.list])


@form
def a_copied_list(m, x):
    return through(x, copy.copy(m.list))


@form
def a_copied_weight(m, x):
    return x @ copy.copy(m.own) + x @ copy.deepcopy(m.a.weight) + x @ m.b.weight


@form
def another_layer_that_holds_it(m, x):
    other = nn.Linear(4, 4, bias=False)
    other.weight = m.own
    return other(x)


@form
def another_name(m, x):
    m.other = m.own
    return x @ m.other


@form
def lent_to_a_layer(m, x):
    return torch.func.functional_call(m.a, {"weight": m.own, "bias": m.a.bias}, (x,))


@form
def found_by_name(m, x):
    return F.linear(x, m.a.get_parameter("weight"), getattr(m.a, "bias"))  # noqa: B009


@form
def read_under_no_grad(m, x):
    with torch.no_grad():
        w, norm = m.own, m.a.weight.norm()
    return x @ w / norm + x @ m.a.weight


@form
def a_leaf(m, x):
    with torch.no_grad():
        wanted = m.own.requires_grad
    return x @ m.own if wanted and not m.own.grad_fn else x


@form
def the_same_when_read_again(m, x):
    w = m.own
    return x @ w if w is m.own else x


@form
def tied_ones_once(m, x):
    return through(x, [m.a.weight] if m.a.weight is m.b.weight else [m.a.weight, m.b.weight])


@form
def a_set_of_them(m, x):
    weights = {m.a.weight, m.b.weight, m.own}
    return sum(x @ w for w in weights)


@form
def across_a_graph_break(m, x):
    w, some = m.own, m.list[:2]
    torch._dynamo.graph_break()
    return through(x @ w if isinstance(w, nn.Parameter) else x, some)


@form
def copied_behind_a_graph_break(m, x):
    w = m.own
    torch._dynamo.graph_break()
    return through(x, nn.ParameterList([w, m.a.weight]))


@form
def in_a_checkpoint(m, x):
    return checkpoint(lambda y: through(y, m.list[:]), x, use_reentrant=False) @ m.own
