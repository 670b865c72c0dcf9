"""What torch's profiler shows of a step has the names of the plan's trace, wherever parameters and states rest."""

import json

import pytest
import torch
from null import offloaded, profiles
from standin import accelerator
from tiered import ALL, assert_same, compiled, made

import zero_compiler as zero


def step_of(model, run, optimizer, x):
    def step():
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ready(folder, tiers=None, overlap=False, compute="aten", **fields):
    """A model whose states rest where its parameters do, and a step of it that has run."""
    model = made(folder, tiers=tiers, **fields)
    run = compiled(model, compute=compute)
    optimizer = zero.optimizer(torch.optim.Adam, model, lr=1e-3, overlap=overlap)
    torch.manual_seed(3)
    step = step_of(model, run, optimizer, torch.randn(8, 64))
    step()
    return model, step


def check_names(model, step, folder):
    """What is planned is measured, and nothing else; the events."""
    events = profiles.profiled(step, folder / "measured.json")
    measured, planned = profiles.names(events), profiles.planned(model, folder / "predicted.json")
    assert set(measured) == planned - profiles.unshown(planned)
    return events


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "tiers",
    [None, ALL, ("nvme", "none", "none"), ("none", "nvme", "none"), ("none", "none", "nvme")],
    ids=["memory", "files", "parameters", "gradients", "states"],
)
def test_names_are_those_of_the_plan(tmp_path, tiers, overlap):
    model, step = ready(tmp_path, tiers, overlap)
    events = check_names(model, step, tmp_path)
    files = {profiles.what_of(e) for e in events if profiles.lane_of(e) in ("nvme-read", "nvme-write")}
    started = {
        w.removeprefix("start of the ") for e in events if "start of the file" in (w := profiles.what_of(e))
    }
    # What is read or written is under way on a thread of the engine's, and started on that of the model.
    assert files == started
    # With overlap a gradient goes straight to its update, and not to its file.
    straight = overlap and tiers == ("none", "nvme", "none")
    assert bool(files) is (tiers is not None and not straight)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"offload_params": "host"}, {"tiers": ALL}], ids=["host", "files"])
def test_names_of_copies_are_those_of_the_plan(tmp_path, fields):
    with accelerator():
        model, step = ready(tmp_path, **fields)
        events = check_names(model, step, tmp_path)
    assert any(profiles.what_of(e).startswith("start of the copy of the gather of") for e in events)


@pytest.mark.slow
def test_names_of_activations_are_those_of_the_plan(tmp_path):
    fields = offloaded.fields_in(tmp_path)()
    torch._dynamo.reset()
    model = zero.shard(offloaded.Net(), **fields, activation_budget_bytes=offloaded.least())
    run = torch.compile(model, backend="zero", options={"compute": "aten"})
    step = lambda: run(*offloaded.x()).backward()  # noqa: E731
    step()
    events = check_names(model, step, tmp_path)
    names = profiles.names(events)
    assert any(name.startswith("zero nvme-write: file of the activation") for name in names)
    assert any(name.startswith("zero compute: release of activation") for name in names)


@pytest.mark.slow
def test_names_of_compiled_segments_are_those_of_the_plan(tmp_path):
    model, step = ready(tmp_path, ALL, compute="inductor")
    check_names(model, step, tmp_path)


def test_an_instruction_lies_in_the_run_of_its_program(tmp_path):
    model, step = ready(tmp_path)
    events = profiles.profiled(step, tmp_path / "measured.json")
    (frame,) = zero.inspect(model).frames
    for phase, program in frame.programs.items():
        if phase == "inference":
            continue
        (whole,) = [e for e in events if profiles.what_of(e) == f"frame {frame.index}, {phase}"]
        inside = [
            profiles.what_of(e)
            for e in sorted(events, key=lambda e: e["ts"])
            if whole["ts"] < e["ts"] and e["ts"] + e["dur"] <= whole["ts"] + whole["dur"]
        ]
        assert inside == [i.name(program) for i in program.instrs if not i.idle(program)]


@pytest.mark.slow
def test_a_profile_changes_nothing_and_leaves_nothing(tmp_path):
    results = []
    threads = []
    for k, profiled in enumerate((False, True, True)):
        folder = tmp_path / str(k)
        folder.mkdir()
        model, step = ready(folder, ALL, overlap=True)
        if profiled:
            profiles.profiled(step, folder / "measured.json")  # begins in the middle of training
        else:
            step()
        step()
        results.append(model)
        threads.append(profiles.threads_of_lanes())
        with pytest.MonkeyPatch.context() as patch:
            for module in ("zero_compiler.ranges", "zero_compiler.runtime.session"):
                patch.setattr(f"{module}.Range", None)  # none is made where no profiler runs
            step()
    assert_same(*results[:2])
    assert_same(*results[1:])
    # Threads of rows wait for the next profile.
    assert threads[2] <= threads[1] <= threads[0] + 2


@pytest.mark.slow
def test_a_schedule_shows_the_steps_that_it_records(tmp_path):
    _, step = ready(tmp_path, ALL)
    found = []

    def done(profile):
        profile.export_chrome_trace(str(tmp_path / f"{len(found)}.json"))
        found.append(profiles.names(profiles.events_of(tmp_path / f"{len(found)}.json")))

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=done) as profile:
        for _ in range(8):
            step()
            profile.step()
    once = profiles.names(profiles.profiled(step, tmp_path / "once.json"))
    assert found == 2 * [{name: 2 * n for name, n in once.items()}]


def test_traces_are_json_that_perfetto_reads(tmp_path):
    model, _ = ready(tmp_path, ALL)
    zero.inspect(model).save_trace(str(tmp_path / "predicted.json"))
    events = json.loads((tmp_path / "predicted.json").read_text())["traceEvents"]
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] >= 0
            rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    # In one row a range lies in another one or beside it.
    for row in rows.values():
        open_ends: list[float] = []
        for begin, end in sorted(row, key=lambda r: (r[0], -r[1])):
            while open_ends and open_ends[-1] <= begin + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-6
            open_ends.append(end)


def test_eager_code_is_named_too(tmp_path):
    model = zero.shard(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)))

    def step():
        model(torch.randn(2, 8)).sum().backward()
        with zero.gathered(model):
            pass

    names = profiles.names(profiles.profiled(step, tmp_path / "measured.json"))
    for name, _ in model.named_parameters():
        assert names[f"zero compute: eager gather of {name}"] == 1
        assert names[f"zero compute: eager reduction of the gradient of {name}"] == 1
        assert names[f"zero compute: zero.gathered: gather of {name}"] == 1
