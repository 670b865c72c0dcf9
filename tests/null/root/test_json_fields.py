"""What is wrong with a JSON file is one sentence that names the field."""

from __future__ import annotations

import json

import pytest

from zero_compiler.errors import ConfigError
from zero_compiler.json_fields import (
    as_flag,
    as_list,
    as_object,
    as_text,
    as_whole,
    check_fields,
    read_json,
    shown,
)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("{", "cannot be read as JSON: "),
        ("[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' is given twice in one object"),
        ("1" * 5000, "cannot be read as JSON: "),
        (b"\xff\xfe", "cannot be read as JSON: "),
    ],
    ids=["unfinished", "deep", "twice", "long", "bytes"],
)
def test_what_is_no_json(tmp_path, text, want):
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_json(path, lambda data: data, "mend it")
    assert str(caught.value).startswith(f"{path}: ")
    assert want in str(caught.value)
    assert str(caught.value).endswith("; mend it")
    assert len(str(caught.value)) < 400


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"a.json: cannot be read: No such file or directory; mend it"):
        read_json(tmp_path / "a.json", lambda data: data, "mend it")
    (tmp_path / "a.json").write_text(json.dumps([1]))
    assert read_json(tmp_path / "a.json", lambda data: data, "") == [1]


@pytest.mark.parametrize(
    ("check", "want"),
    [
        (lambda: check_fields("a", "it", [], (), ()), "a: it must be an object of fields, not []"),
        (
            lambda: check_fields("a", "it", {"kepd": 1}, ("kept",), ()),
            "no field 'kepd'; did you mean 'kept'?",
        ),
        (lambda: check_fields("a", "b", {"x": 1}, (), ()), "a: there is no field 'x' of b"),
        (lambda: check_fields("a", "b", {}, ("x",), ("x",)), "a: 'x' of b is missing"),
        (lambda: as_list("a", "b", {}), "a: b must be a list, not {}"),
        (lambda: as_object("a", "b", 3), "a: b must be an object of fields, not 3"),
        (lambda: as_text("a", "b", None), "a: b must be a text, not None"),
        (lambda: as_flag("a", "b", 1), "a: b must be true or false, not 1"),
        (lambda: as_whole("a", "b", True, 0), "a: b must be a whole number from 0 to"),
        (lambda: as_whole("a", "b", float("nan"), 0), "not nan"),
        (lambda: as_whole("a", "b", 2.0, 0), "not 2.0"),
        (
            lambda: as_whole("a", "b", 10**30, 0),
            "must be a whole number from 0 to 9,223,372,036,854,775,807, not 1",
        ),
        (lambda: as_whole("a", "b", -1, 0), "not -1"),
    ],
)
def test_a_wrong_value_is_named(check, want):
    with pytest.raises(ConfigError) as caught:
        check()
    assert want in str(caught.value)


def test_right_values_come_back():
    assert (as_flag("", "", True), as_whole("", "", 3, 1), as_text("", "", "x")) == (True, 3, "x")
    assert (as_list("", "", [1]), as_object("", "", {"a": 1})) == ([1], {"a": 1})
    assert len(shown([[["x" * 1000] * 1000] * 100] * 100)) == 120
