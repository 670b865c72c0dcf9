"""Options of Inductor reach the segments that it compiles, and what it does not know is refused."""

from __future__ import annotations

import pytest
import torch
from null.small import mlp
from torch._inductor import compile_fx, config

import zero_compiler as zero
from zero_compiler import inductor_options
from zero_compiler.errors import ConfigError

FIELDS = {"epilogue_fusion": False, "max_fusion_size": 5}


@pytest.mark.filterwarnings("error::FutureWarning")  # torch says what it will no longer have
def test_fields_are_held_as_json_and_come_back():
    made = zero.Config(inductor=FIELDS)
    assert made.inductor == '{"epilogue_fusion": false, "max_fusion_size": 5}'
    assert zero.Config.from_dict(made.to_dict()) == zero.Config(inductor=made.inductor) == made
    assert inductor_options.patches(None, made.inductor) == FIELDS
    assert inductor_options.patches(None, None) == {}
    both = inductor_options.patches("max-autotune-no-cudagraphs", '{"max_autotune": false}')
    assert both["max_autotune"] is False
    assert both["coordinate_descent_tuning"] is True


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"inductor": {"epilog_fusion": True}},
            "unknown option 'epilog_fusion' .* did you mean 'epilogue_fusion'",
        ),
        ({"inductor": {"zzz": True}}, "unknown option 'zzz' .*list_options"),
        ({"inductor": {"max_fusion_size": "5"}}, "the value must be of type int"),
        (
            {"inductor": {"triton.cudagraphs": True}},
            "'triton.cudagraphs': True.* is not possible: .*; mode=\"reduce-overhead\" records",
        ),
        (
            {"inductor": {"post_grad_custom_pre_pass": print}},
            "takes values that JSON has, since ranks compare them",
        ),
        ({"inductor": 3}, "inductor must be a dictionary of fields by name, not 3"),
        ({"inductor": "{"}, "inductor must be a dictionary or its JSON: "),
        ({"mode": "fast"}, "mode must be one of default, .*max-autotune-no-cudagraphs, .*, not 'fast'"),
        (
            {"mode": "default", "compute": "aten"},
            'mode is for what Inductor compiles: give compute="inductor"',
        ),
    ],
)
def test_what_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        zero.Config(**fields)


@pytest.mark.parametrize(
    ("mode", "records"),
    [
        (None, False),
        ("default", False),
        ("max-autotune-no-cudagraphs", False),
        ("reduce-overhead", True),
        ("max-autotune", True),
    ],
)
def test_modes_that_record_graphs(mode, records):
    assert zero.Config(mode=mode).mode == mode
    assert inductor_options.records_graphs(mode) is records


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"options": {"inductor": FIELDS}},
        {"options": {"inductor": FIELDS, "mode": "max-autotune-no-cudagraphs"}},
        {"mode": "max-autotune-no-cudagraphs"},
    ],
    ids=["inductor", "both", "mode"],
)
def test_segments_are_compiled_with_them(given, monkeypatch):
    seen = []
    inner = compile_fx.compile_fx_inner

    def watched(*args, **kwargs):
        seen.append((config.epilogue_fusion, config.max_fusion_size, config.max_autotune))
        return inner(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", watched)
    before = (config.epilogue_fusion, config.max_fusion_size, config.max_autotune)
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = mlp()
    model = zero.shard(mlp(), device="cpu")
    model.load_state_dict(plain.state_dict())
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.compile(model, backend="zero", **given)(x), plain(x))
    want = (False, 5) if "options" in given else before[:2]
    tuned = given.get("mode", given.get("options", {}).get("mode")) is not None
    assert seen
    assert set(seen) == {(*want, tuned)}
    assert (config.epilogue_fusion, config.max_fusion_size, config.max_autotune) == before


@pytest.mark.slow
def test_they_hold_for_passes_before_segments_are_made():
    """Random numbers of eager code: their operators are exchanged for Inductor's own in the joint graph, or not."""

    def made():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 16))

    torch._dynamo.reset()
    x, plain = torch.randn(8, 16), made()
    call = torch.compile(
        zero.shard(made(), device="cpu"), backend="zero", options={"inductor": {"fallback_random": True}}
    )
    torch.manual_seed(3)
    want = plain(x).square().mean()
    torch.manual_seed(3)
    loss = call(x).square().mean()
    torch.testing.assert_close(loss, want)
    loss.backward()
    want.backward()
    torch.testing.assert_close(call._orig_mod[0].weight.grad.full_tensor(), plain[0].weight.grad)
