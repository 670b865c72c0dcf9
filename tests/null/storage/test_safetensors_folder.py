"""Folders of safetensors files: what is in them, and when."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors import safe_open

from zero_compiler.errors import ConfigError, StorageError
from zero_compiler.storage import safetensors_folder
from zero_compiler.storage.safetensors_folder import TensorEntry, WeightsFolder, files_of

VALUES = {dtype: (torch.arange(7) % 2).to(dtype) for dtype in safetensors_folder.DTYPE_NAMES}


def entries(*sizes):
    return [TensorEntry(f"t{i}", (n,), torch.float32) for i, n in enumerate(sizes)]


def written(folder, given, max_file_bytes=1 << 30, value=1.0):
    files = files_of(given, max_file_bytes)
    out = WeightsFolder(folder, files, "a test")
    out.begin()
    for file in files:
        out.open(file)
        for entry in file.entries:
            out.write(torch.full(entry.shape, value, dtype=entry.dtype))
    return out


def test_every_dtype_is_read_back(tmp_path):
    given = [TensorEntry(str(dtype), (7,), dtype) for dtype in VALUES]
    (file,) = files_of(
        [*given, TensorEntry("scalar", (), torch.float32), TensorEntry("none", (0, 3), torch.int8)], 999
    )
    out = WeightsFolder(tmp_path, [file], "a test")
    out.begin()
    out.open(file)
    for entry in file.entries:
        if entry.shape == (7,):
            out.write(VALUES[entry.dtype][:3])  # in parts
            out.write(VALUES[entry.dtype][3:])
        elif not entry.shape:
            out.write(torch.tensor(2.5))
    out.commit()
    with safe_open(tmp_path / "model.safetensors", framework="pt") as read:
        for dtype, values in VALUES.items():
            found = read.get_tensor(str(dtype))
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
        assert read.get_tensor("scalar") == 2.5
        assert read.get_tensor("none").shape == (0, 3)


def test_files_keep_to_their_size():
    def sizes(limit):
        return [[e.name for e in file.entries] for file in files_of(entries(2, 2, 9, 1, 1), limit)]

    assert sizes(1000) == [["t0", "t1", "t2", "t3", "t4"]]
    assert sizes(16) == [["t0", "t1"], ["t2"], ["t3", "t4"]]
    assert sizes(1) == [["t0"], ["t1"], ["t2"], ["t3"], ["t4"]]
    assert [f.name for f in files_of(entries(1, 1), 4)] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    with pytest.raises(ConfigError, match="max_file_bytes must be a number of bytes above 0, not 1.5"):
        files_of(entries(1), 1.5)
    with pytest.raises(ConfigError, match="z is of torch.complex128, which a safetensors file cannot hold"):
        files_of([TensorEntry("z", (1,), torch.complex128)], 99)


def test_an_earlier_export_is_replaced_as_a_whole(tmp_path):
    written(tmp_path, entries(1, 1, 1), 4, value=1.0).commit()
    out = written(tmp_path, entries(2, 2), 8, value=2.0)
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) == 3
    out.commit()
    numbered = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(os.listdir(tmp_path)) == [*numbered, "model.safetensors.index.json"]
    written(tmp_path, entries(2, 2), value=3.0).commit()
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_the_file_that_readers_look_for_goes_first_and_comes_last(tmp_path, monkeypatch):
    """After each change of a name there are no files that look whole and are not those of one export."""
    for before, after in ((99, 99), (99, 8), (8, 99), (8, 8)):
        folder = tmp_path / f"{before}.{after}"
        written(folder, entries(2, 2), before).commit()
        out = written(folder, entries(2, 2), after, value=2.0)
        with open(os.path.join(out.unfinished, "config.json"), "w") as file:
            file.write("{}")
        seen = []

        def look(original, folder=folder, seen=seen):
            def call(*args):
                seen.append((whole(folder), (folder / "config.json").exists()))
                original(*args)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", look(os.replace))
            patch.setattr(os, "unlink", look(os.unlink))
            out.commit()
        seen.append((whole(folder), (folder / "config.json").exists()))
        assert seen[0] == ({1.0}, False)
        assert seen[-1] == ({2.0}, True)
        assert all(values in (set(), {1.0}) for values, _ in seen[:-1])
        assert all(values == set() for values, config in seen[:-1] if config)


def whole(folder):
    """Which values a reader of the folder finds, by either of the files that it may look for."""
    found = set()
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"} if (folder / "model.safetensors").exists() else set()
    if index.exists():
        names |= set(json.loads(index.read_text())["weight_map"].values())
    for name in names:
        with safe_open(folder / name, framework="pt") as read:
            for key in read.keys():
                found |= set(read.get_tensor(key).tolist())
    return found


def test_two_exports_at_once_are_refused(tmp_path):
    first = written(tmp_path, entries(1))
    with pytest.raises(StorageError, match="another export writes to .* now"):
        WeightsFolder(tmp_path, files_of(entries(1), 9), "a test").begin()
    first.discard()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a test: .* cannot be written: .*room for 4 bytes"):
        WeightsFolder(tmp_path / "file", files_of(entries(1), 9), "a test").begin()
    out = WeightsFolder(
        tmp_path / "full", files_of([TensorEntry("t", (1 << 50,), torch.int8)], 1 << 60), "a test"
    )
    out.begin()
    with pytest.raises(StorageError, match="No space left|File too large"):
        out.open(out._files[0])
    out.discard()
    assert os.listdir(tmp_path / "full") == []
