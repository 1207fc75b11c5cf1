"""Tests of suffix trees: skipped without the library, but for a run that has built it."""

import importlib
import os

import pytest

REQUIRED = "SUFFIX_TREES_REQUIRED"
"""An environment variable. `.ci/run` sets it: if the build fails, so do the tests; else nobody would hear of it."""


def require() -> None:
    name = "arctic_inference.suffix_decoding"
    importlib.import_module(name) if os.environ.get(REQUIRED) else pytest.importorskip(name)
