"""Rules that every file in passes/ keeps: what a pass refuses, and that its refusals, numbers and graphs have tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from null.sentences import ROOT, untested

from zero_compiler import errors


def passes_by_file() -> list[tuple[Path, ast.ClassDef]]:
    """The passes, as they stand in the source: classes with a ``run``."""
    return [
        (path, node)
        for path in sorted((ROOT / "passes").rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and [ast.unparse(b) for b in node.bases] != ["Protocol"]
        if any(isinstance(f, ast.FunctionDef) and f.name == "run" for f in node.body)
    ]


ERRORS = {name for name in vars(errors) if name.endswith("Error") or name == "PassRefused"}


def test_a_pass_refuses_what_it_says_and_nothing_else():
    """A pass whose docstring names something that it refuses raises an error of ours, and no other file does."""
    says = {path for path, c in passes_by_file() if "Refuses: nothing" not in (ast.get_docstring(c) or "")}
    does = {
        path
        for path in (ROOT / "passes").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS
    }
    assert does == says
    assert {path.name for path in says} == {"merge_markers.py", "choose_saved.py"}


def test_every_refusal_of_a_pass_has_a_test():
    for path in ("merge_markers.py", "choose_saved.py"):
        assert untested(ROOT / "passes" / path, ERRORS) == []


# Where the numbers of each pass are compared: with those of the graph before it, or of the plain model.
NUMBERS = {
    "BucketTransfers": "test_base::test_passes_of_a_phase_keep_the_numbers",
    "ChooseSaved": "test_activations::test_two_ranks_get_the_numbers_of_plain_pytorch",
    "CloneEscapes": "test_clone_escapes::test_a_view_that_leaves_is_a_copy",
    "ExpandTiles": "tiling/test_tile_operators::test_a_linear_layer_in_tiles_keeps_the_numbers",
    "InsertReleases": "test_base::test_passes_of_a_phase_keep_the_numbers",
    "KeepOldValues": "test_lifetimes::test_backward_sees_what_forward_saw_of_a_buffer",
    "LandProducts": "test_land_products::test_numbers",
    "LowerMarkers": "test_base::test_passes_of_a_phase_keep_the_numbers",
    "MergeMarkers": "test_merge_markers::test_merge_markers_keeps_the_numbers",
    "OffloadActivations": "test_offload_activations::test_two_ranks_get_the_numbers_of_plain_pytorch",
    "PartitionActivations": "test_partition_activations::test_every_rank_computes_what_it_did",
    "PickKernels": "test_pick_kernels::test_numbers",
    "PlaceOffloads": "test_offload_activations::test_two_ranks_get_the_numbers_of_plain_pytorch",
    "PlaceStarts": "test_place_transfers::test_starts_further_ahead_keep_the_numbers",
    "SecondShards": "test_second_shards::test_backward_has_the_weights_that_forward_had",
    "TagRecompute": "test_lifetimes::test_a_view_that_crosses_segments",
    "TileLoss": "tiling/test_tile_loss::test_the_passes_keep_the_numbers",
    "TileMlp": "tiling/test_tile_mlp::test_the_passes_keep_the_numbers",
    "TileOperators": "tiling/test_tile_operators::test_a_linear_layer_in_tiles_keeps_the_numbers",
}


def test_every_pass_has_a_test_of_its_numbers():
    assert sorted(NUMBERS) == sorted(c.name for _, c in passes_by_file())
    for place in NUMBERS.values():
        file, name = place.split("::")
        tree = ast.parse((ROOT / "tests" / "null" / "passes" / f"{file}.py").read_text())
        assert name in [n.name for n in tree.body if isinstance(n, ast.FunctionDef)], place


# Passes over a partition change two graphs: their golden tests show both, or all that happens to what is handed over.
GOLDENS = {
    "OffloadActivations": "test_place_offloads::test_place_offloads",
    "PartitionActivations": "test_partition_activations::test_the_graphs_before_and_after",
}


def test_every_pass_has_a_golden():
    """The golden graph of a pass stands in the file of tests that has the name of the pass's file."""
    for path, cls in passes_by_file():
        golden = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.name).lower()
        folder = path.parent.relative_to(ROOT / "passes")
        file, name = GOLDENS.get(cls.name, f"{folder / f'test_{path.stem}'}::test_{golden}").split("::")
        tree = ast.parse((ROOT / "tests" / "null" / "passes" / f"{file}.py").read_text())
        tests = [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        assert name in tests, f"{file} has no golden graph of {cls.name}"
