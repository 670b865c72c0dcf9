"""Errors of the user's code in one line."""

from __future__ import annotations

import torch

from zero_compiler.tools.error_lines import last_line


def raised(make) -> str:
    try:
        make()
    except Exception as error:
        return last_line(error)
    raise AssertionError("nothing was raised")


def test_the_place_is_the_last_one_of_the_users_code():
    def through_torch():
        torch.nn.Linear(2, 3)(torch.ones(2, 5))  # raised far below, in torch

    line = raised(through_torch)
    assert line.startswith(f"{__file__}:{through_torch.__code__.co_firstlineno + 1}: RuntimeError: ")


def test_a_message_of_many_lines_is_one_and_not_endless():
    def long():
        raise ValueError("first\n  second\n\nadvice" + 1000 * "x")

    def endless():
        raise ValueError(1000 * "x")

    def silent():
        raise ValueError

    assert raised(long).endswith(": ValueError: first second")
    assert raised(endless).endswith("x...")
    assert len(raised(endless)) < 600
    assert raised(silent).endswith(": ValueError")


def test_the_place_is_the_one_that_dynamo_names():
    error = RuntimeError(
        'no such\n\nfrom user code:\n   File "/mine.py", line 7, in forward\n    x + y\n\nadvice'
    )
    assert last_line(error) == "/mine.py:7: RuntimeError: no such"
