"""The command line of the benchmark."""

import argparse

import pytest

from vllm_adaptive_tree.bench.environment import PAIR
from vllm_adaptive_tree.bench.run import cells
from vllm_adaptive_tree.cli.bench import _config, _list, _method, _rounds, add_arguments
from vllm_adaptive_tree.cli.main import main


def test_arguments():
    assert _list(int)("1, 3,5") == [1, 3, 5]
    assert _list(int)("") == []
    assert _config('wide={"method": "opt_tree", "num_speculative_tokens": 8}')[0] == "wide"
    for kind, text, message in (
        (_method, "opt", "no tree method; known: adaptive_tree, opt_tree"),
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


def test_a_bundled_model_that_is_not_installed(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--out", str(tmp_path / "o"), "--model", str(PAIR / "missing")])
    assert "is not installed: pip install --find-links dist 'vllm-adaptive-tree[demo]'" in capsys.readouterr().err


def test_a_bursty_load():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    bursty = ["--bursty", "4", "--bursty-seconds", "2", "--requests-per-slot", "5"]
    options = parser.parse_args(["--out", "o", *bursty, "--sampled", "8"])
    assert [(cell.place, cell.concurrency, cell.requests) for cell in cells(options)][4:6] == [
        ("offline", 8, 40),
        ("bursty", 4, None),
    ]
    assert options.bursty_seconds == 2
