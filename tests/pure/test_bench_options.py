"""The command line of the benchmark."""

import argparse

import pytest

from vllm_adaptive_tree.bench.run import cells
from vllm_adaptive_tree.cli.bench import _config, _list, _method, _rounds
from vllm_adaptive_tree.cli.main import main


def test_arguments():
    assert _list(int)("1, 3,5") == [1, 3, 5]
    assert _list(int)("") == []
    assert _config('wide={"method": "opt_tree", "num_speculative_tokens": 8}')[0] == "wide"
    for kind, text, message in (
        (_method, "opt", "no tree method; known: opt_tree"),
        (_rounds, "4", "4 rounds are too few for a ratio; give 5 or more"),
        (_config, "wide", "no NAME=JSON"),
        (_config, 'wide={"method": "opt_tree"}', "num_speculative_tokens"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            kind(text)
    nothing = argparse.Namespace(concurrency=[], sampled=[], server=[], bursty=None, first_steps=[])
    with pytest.raises(ValueError, match="nothing to measure"):
        cells(nothing)


def test_two_of_one_name(tmp_path, capsys):
    twice = ["bench", "--out", str(tmp_path / "o"), "--methods", "opt_tree,opt_tree", "--concurrency", "1"]
    assert main(twice) == 2
    assert "two configurations have the name 'opt_tree'" in capsys.readouterr().err
