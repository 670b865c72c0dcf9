"""Predicted times beside those of a profile: each row is what the two traces say, largest difference first."""

import gzip
import json

import pytest
import torch
from null import profiles
from tiered import ALL, compiled, made
from typer.testing import CliRunner

import zero_compiler as zero
from zero_compiler.errors import ConfigError
from zero_compiler.report.compare_traces import ComparedRange, compare_traces
from zero_compiler.tools import cli


@pytest.fixture
def trained(tmp_path):
    model = made(tmp_path, tiers=ALL, bucket_bytes=1)  # each parameter has a gather of its own
    run = compiled(model)
    optimizer = zero.optimizer(torch.optim.Adam, model, lr=1e-3)

    def step():
        run(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, step


def test_rows_are_what_the_two_traces_say(trained, tmp_path):
    model, step = trained
    path = tmp_path / "measured.json"
    events = profiles.profiled(lambda: [step() for _ in range(3)], path)
    plan = zero.inspect(model)
    found = plan.compare(path)
    (frame,) = plan.frames
    runs = {r.name: r for r in found.runs}
    for phase in ("forward", "backward"):
        run = runs[f"frame {frame.index}, {phase}"]
        assert run.count == 3
        assert run.measured_us == pytest.approx(
            sum(e["dur"] for e in events if profiles.what_of(e) == run.name) / 3
        )
    for row in found.rows:
        assert row.measured_us is not None or row.name.startswith(profiles.PLANNED_ONLY), row
        if row.lane == "nvme-write":  # in one run only, each of them; an update writes two files
            mine = [e["dur"] for e in events if e["name"] == f"zero nvme-write: {row.name}"]
            assert row.measured_us == pytest.approx(sum(mine) / 3)
    differences = [abs(r.difference_us) for r in found.rows]
    assert differences == sorted(differences, reverse=True)
    # What forward and backward both gather is measured in each.
    both = [r for r in found.rows if r.lane == "nvme-read" and r.name == "file of the gather of inner.weight"]
    assert {r.run for r in both} == {f"frame {frame.index}, {p}" for p in ("forward", "backward")}
    total = [e["dur"] for e in events if e["name"] == f"zero nvme-read: {both[0].name}"]
    assert sum(r.measured_us for r in both) == pytest.approx(sum(total) / 3)
    text = str(found)
    assert f"frame {frame.index}, forward: predicted" in text
    assert "(mean of 3)" in text


def test_names_of_rows_say_nothing(trained, tmp_path):
    """A profiler calls the row of a thread as the process is called, or not at all, where it does not know better."""
    model, step = trained
    path = tmp_path / "measured.json"
    profiles.profiled(lambda: [step() for _ in range(2)], path)
    plan = zero.inspect(model)
    found = plan.compare(path)
    assert {"compute", "nvme-read", "nvme-write"} == {row.lane for row in found.rows}
    trace = json.loads(path.read_text())
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e.get("name") != "thread_name"]
    path.write_text(json.dumps(trace))
    assert plan.compare(path) == found


def test_the_command_line_says_the_same(trained, tmp_path):
    model, step = trained
    measured, predicted = tmp_path / "measured.json", tmp_path / "predicted.json"
    profiles.profiled(step, measured)
    plan = zero.inspect(model)
    plan.save_trace(str(predicted))
    found = plan.compare(measured)
    assert compare_traces(predicted, measured) == found
    done = CliRunner().invoke(cli.app, ["compare", str(predicted), str(measured), "--rows", "7"])
    assert done.exit_code == 0, done.output
    assert done.stdout == found.text(7) + "\n"
    assert f"and {len(found.rows) - 7} more with smaller differences" in done.stdout
    plan.save_json(str(tmp_path / "plan.json"))
    for path, why in ((measured, "has no predicted range"), (tmp_path / "plan.json", "could not be read")):
        with pytest.raises(
            ConfigError, match=f"{path.name}' {why}.*; give the trace of a plan, as zero.inspect"
        ):
            compare_traces(path, measured)


def test_a_compressed_trace_serves_as_well(trained, tmp_path):
    model, step = trained
    profiles.profiled(step, tmp_path / "measured.json")
    raw = (tmp_path / "measured.json").read_bytes()
    (tmp_path / "measured.json.gz").write_bytes(gzip.compress(raw))
    plan = zero.inspect(model)
    assert plan.compare(str(tmp_path / "measured.json.gz")) == plan.compare(tmp_path / "measured.json")


def test_a_profiler_that_has_not_exported_its_trace_serves_as_well(trained, tmp_path):
    model, step = trained
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    plan = zero.inspect(model)
    exported, export = tmp_path / "measured.json", profile.export_chrome_trace

    def kept(path):
        export(path)
        exported.write_bytes(open(path, "rb").read())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "export_chrome_trace", kept)
        found = plan.compare(profile)
    assert found == plan.compare(exported)
    with pytest.raises(ConfigError, match="could not export its trace .*give one that has ended"):
        plan.compare(profile)
    with pytest.raises(ConfigError, match="could not export its trace .*give one that has ended"):
        plan.compare(torch.profiler.profile())


def test_a_collective_that_nobody_waited_for_is_measured_to_a_bound():
    def difference(measured_us, at_most=False):
        row = ComparedRange("frame 0, forward", "device-device", "gather of w", 10.0, measured_us, at_most)
        return row.difference_us

    assert difference(500.0, at_most=True) == 0.0
    assert difference(4.0, at_most=True) == -6.0
    assert difference(500.0) == 490.0
    assert difference(None) == 0.0


def test_what_is_no_profile_of_this_model_is_refused(trained, tmp_path):
    model, _ = trained
    plan = zero.inspect(model)
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "list.json").write_text(json.dumps({"events": []}))
    for name in ("none.json", "empty.json", "list.json"):
        with pytest.raises(ConfigError, match=f"{name}' could not be read as a Chrome trace"):
            plan.compare(tmp_path / name)
    with pytest.raises(ConfigError, match=r"takes the path of a Chrome trace .*, not int"):
        plan.compare(3)
    profiles.profiled(lambda: torch.ones(2) + 1, tmp_path / "other.json")
    plan.save_trace(str(tmp_path / "predicted.json"))
    for name in ("other.json", "predicted.json"):
        with pytest.raises(
            ConfigError, match=r"the trace has no range of a Program of this model \(\"frame "
        ):
            plan.compare(tmp_path / name)
    fresh = zero.shard(torch.nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="none: it is not compiled yet"):
        zero.inspect(fresh).compare(tmp_path / "other.json")
