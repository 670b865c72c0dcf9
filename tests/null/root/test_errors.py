"""Errors that users meet: one base, and the classes of Python that they also are."""

from __future__ import annotations

import errno

from zero_compiler import errors


def test_every_error_is_one_of_ours():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and c.__module__ == errors.__name__]
    assert all(issubclass(c, errors.ZeroError) and c.__doc__ for c in classes)
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.StorageError, errors.TransferError)


def test_an_error_of_a_file_says_where():
    error = errors.StorageError("it is full", errno=errno.ENOSPC, path="/f", label="w", offset=4096, nbytes=8)
    assert (error.errno, error.path, error.label, error.offset, error.nbytes) == (
        errno.ENOSPC,
        "/f",
        "w",
        4096,
        8,
    )
    assert str(error) == "it is full"
