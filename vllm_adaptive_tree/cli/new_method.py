"""Write a package with a small working proposer, rule, draft or head, and a test of it, to start from."""

import argparse
import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.drafters import DRAFT_KINDS, DRAFTERS
from vllm_adaptive_tree.proposers import PROPOSERS
from vllm_adaptive_tree.registry import Registry

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "new_method"
version = "0.1"
dependencies = ["vllm-adaptive-tree"]

[project.entry-points."GROUP"]
new_method = "new_method:NewMethod"

[tool.setuptools]
py-modules = ["new_method"]
"""
README = """\
# new_method

`pip install -e . && pytest` installs and checks it; then

```bash
vllm serve TARGET --speculative-config '{CONFIG, "num_speculative_tokens": 12}'
```
"""
PROPOSER_TEST = '''\
"""Trees are well-formed, and all rules that serve them keep the target's distribution."""

import pytest
from new_method import NewMethod, NewMethodOptions

from vllm_adaptive_tree.acceptance import legal_rules
from vllm_adaptive_tree.testing import assert_lossless, assert_well_formed

PROPOSER = NewMethod.build(NewMethodOptions(), nodes=8)


def test_trees():
    assert_well_formed(PROPOSER)


@pytest.mark.parametrize("rule", legal_rules(NewMethod.kinds, PROPOSER.max_children))
def test_output(rule):
    assert_lossless(rule, PROPOSER)
'''
RULE_TEST = '''\
"""The rule keeps the target's distribution, for each of its kinds of children."""

import pytest
from new_method import NewMethod

from vllm_adaptive_tree.testing import assert_lossless


@pytest.mark.parametrize("kind", NewMethod.kinds)
def test_output(kind):
    assert_lossless(NewMethod, kind)
'''
DRAFT_TEST = '''\
"""The draft says what is expected, also at the beginning of a text. Any draft is lossless."""

import torch
from new_method import NewMethod, NewMethodOptions

from vllm_adaptive_tree.drafters import Texts

TEXTS = Texts(("long", "short"), torch.tensor([[7, 1, 2, 3], [5, 0, 0, 0]]), torch.tensor([4, 1]), torch.tensor([1, 1]))


def test_continuations():
    draft = NewMethod.build(NewMethodOptions(period=3), vocabulary=8)
    assert draft.continuations(TEXTS).tokens.tolist() == [[[1, 2, 3]], [[-1, -1, 5]]]
'''

HEAD_TEST = '''\
"""A checkpoint says by its config.json that it is this head; that of an EAGLE-3 head does not."""

import pytest
from new_method import NewMethod
from vllm import ModelRegistry

from vllm_adaptive_tree import register
from vllm_adaptive_tree.engine.checkpoint import Checkpoint
from vllm_adaptive_tree.engine.drafts.registry import kind_of


@pytest.mark.parametrize(("cls", "kind"), [("Eagle3NewMethod", "new_method"), ("LlamaForCausalLMEagle3", "eagle3")])
def test_its_checkpoints(cls, kind):
    register("new_method", NewMethod)
    draft = Checkpoint("HEAD", {"architectures": [cls]}, {"fc.weight": (8, 24), "midlayer.mlp.up_proj.weight": (8, 8)})
    assert kind_of(draft, said=None, target="TARGET").name == kind
    assert cls in ModelRegistry.get_supported_archs()
'''


class Template(NamedTuple):
    module: str
    """File in `templates`."""
    registry: Registry[type]
    config: str
    """How a user asks for it."""
    test: str


PROPOSER = Template("proposer", PROPOSERS, '"method": "new_method", "model": "DRAFT"', PROPOSER_TEST)
RULE = Template(
    "rule", RULES, '"method": "static_tree", "model": "DRAFT", "rejection_sample_method": "new_method"', RULE_TEST
)
HEAD = Template(
    "head", DRAFT_KINDS, '"method": "adaptive_tree", "model": "HEAD", "tree": {"draft": "new_method"}', HEAD_TEST
)
DRAFT = Template("draft", DRAFTERS, '"method": "adaptive_tree", "model": "new_method"', DRAFT_TEST)
EXAMPLES = (
    "my_method",
    "my_rule --rule --dir packages",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="what users will write, and the name of package and module")
    parser.add_argument(
        "--dir", type=Path, default=Path(), metavar="DIR", help="folder for the package (default: here)"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--rule", dest="template", action="store_const", const=RULE, help="an acceptance rule")
    kind.add_argument(
        "--draft", dest="template", action="store_const", const=DRAFT, help="a draft without a checkpoint"
    )
    kind.add_argument(
        "--head", dest="template", action="store_const", const=HEAD, help="a head that reads the target's states"
    )
    parser.set_defaults(template=PROPOSER)


def run(options: argparse.Namespace) -> int:
    """Write the package."""
    folder: Path = options.dir / options.name
    check_name(options.name, options.template.registry)
    if folder.exists():
        raise ValueError(f"{folder} exists already; choose another name, or another folder with --dir")
    folder.mkdir(parents=True)
    for name, text in package(options.name, options.template).items():
        (folder / name).write_text(text)
    print(f"{folder}: change {options.name}.py; pip install -e {folder} && pytest {folder}")
    return 0


def check_name(name: str, registry: Registry[type]) -> None:
    """
    Raises:
        ValueError: the name is none, or belongs to something else.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is no name for a module: give lower-case words joined by '_', as in my_method")
    if name in registry or name in registry.reserved:
        raise ValueError(f"{name!r} is taken; choose another name for your {registry.noun}")
    if find_spec(name) is not None:
        raise ValueError(f"{name!r} is the name of an installed module; choose another name")


def package(name: str, template: Template) -> dict[str, str]:
    """Files of the package, name -> text."""
    module = (Path(__file__).parent / "templates" / f"{template.module}.py").read_text()
    class_name = "".join(word.capitalize() for word in name.split("_"))
    files = {
        "pyproject.toml": PYPROJECT.replace("GROUP", template.registry.group),
        "README.md": README.replace("CONFIG", template.config),
        f"{name}.py": module,
        f"test_{name}.py": template.test,
    }
    return {file: text.replace("new_method", name).replace("NewMethod", class_name) for file, text in files.items()}
