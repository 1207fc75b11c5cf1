"""Configurations and server arguments of README and docs, parsed without starting an engine."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT, all_blocks, commands, configs
from tests.engine.engines import DRAFT, PAIR, TARGET
from vllm_adaptive_tree.engine.startup.finish import tree_options
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers import PROPOSERS

PAPERS = sorted((ROOT / "examples" / "papers").glob("*.json"))
LOSSY = {"mcsd"}


def build(spec: dict[str, Any], **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=TARGET, speculative_config=spec, **{"max_model_len": 512, **arguments}
    ).create_engine_config()


@pytest.mark.parametrize("file", PAPERS, ids=lambda file: file.stem)
def test_the_papers_settings(file: Path) -> None:
    spec = json.loads(file.read_text())
    assert spec["model"] == "DRAFT"
    options = tree_options(build({**spec, "model": DRAFT}))
    pair = resolve(options)
    assert (options.method, options.num_speculative_tokens) == (spec["method"], spec["num_speculative_tokens"])
    assert pair.rule_name == spec["rejection_sample_method"]
    assert options.tree.budget is None, "whole trees, as in the papers"
    assert pair.lossless == (file.stem not in LOSSY)
    if file.stem in ("mcsd", "mcsd-lossless", "spechub"):
        assert pair.proposer.max_nodes == spec["num_speculative_tokens"], "no node is cut, none is missing"


def test_there_is_one_for_each_paper() -> None:
    assert {"opt_tree", "dyspec", "c2t", "mcsd", "spechub"} <= {file.stem for file in PAPERS}


def bundled(spec: dict[str, Any]) -> dict[str, Any] | None:
    """A shown configuration for the bundled pair; None where it has nothing of that kind."""
    tree, model = spec.get("tree", {}), spec.get("model")
    if spec["method"] not in PROPOSERS or "suffix" in (model, tree.get("lookup")) or model == "again":
        return None
    if tree.get("draft") in ("mtp", "eagle"):
        return None
    if model == "ngram":
        return spec
    head = model is not None and any(word in model.upper() for word in ("HEAD", "EAGLE"))
    return {**spec, "model": str(PAIR / "head") if head else DRAFT}


SHOWN = [(block, spec) for block, spec in configs() if bundled(spec) is not None]


@pytest.mark.parametrize(("block", "spec"), SHOWN, ids=str)
def test_a_shown_configuration_is_taken(
    block: Any, spec: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = bundled(spec)
    assert found is not None
    assert tree_options(build(found)).method == spec["method"]


def test_most_of_what_is_shown_is_taken() -> None:
    assert len(SHOWN) >= 8


def test_servers_take_the_arguments() -> None:
    """Of every `vllm serve` and `vllm-adaptive-tree serve`, by vLLM's own parser."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    seen = 0
    for block in all_blocks("bash"):
        for words in commands(block):
            if words[1:2] != ["serve"] or not words[0].endswith(("vllm", "vllm-adaptive-tree")):
                continue
            given = [word for word in words[2:] if word != ".."]
            for place in [place for place, word in enumerate(given) if word == "--speculative-config"]:
                config = given[place + 1] if place + 1 < len(given) else ""
                if not config.startswith("{") or ".." in config:  # left out, or of a shell
                    given[place : place + 2] = []
            options = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
            assert options.model_tag, shlex.join(words)
            seen += 1
    assert seen >= 8
