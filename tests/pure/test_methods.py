"""Pairs of a method and a rule that decode, and the objects built for them."""

import re
from dataclasses import replace

import pytest
from safetensors.torch import save_file

from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.methods import as_chains, clamp_budget, resolve
from vllm_adaptive_tree.proposers import METHODS, StaticTree
from vllm_adaptive_tree.proposers.adaptive_tree import AdaptiveTree
from vllm_adaptive_tree.proposers.c2t import C2T
from vllm_adaptive_tree.proposers.dyspec import DySpec
from vllm_adaptive_tree.proposers.eagle2 import Eagle2
from vllm_adaptive_tree.proposers.gate import Gate
from vllm_adaptive_tree.proposers.mcsd import Mcsd
from vllm_adaptive_tree.proposers.opt_tree import OptTree
from vllm_adaptive_tree.trees import Shape

from .test_config import in_another_process, parsed


@pytest.fixture
def files(tmp_path):
    """Options that name the files which a method needs."""
    save_file(Gate(3, 48).state_dict(), tmp_path / "c2t.safetensors")
    save_file(Gate(11, 44).state_dict(), tmp_path / "mcsd.safetensors")
    (tmp_path / "vector.json").write_text('{"vector": [0.5, 0.2, 0.1]}')
    return {
        "c2t": {"gate": str(tmp_path / "c2t.safetensors")},
        "mcsd": {"gate": str(tmp_path / "mcsd.safetensors"), "stop": "type2"},
        "sequoia": {"vector": str(tmp_path / "vector.json")},
    }


# -- chains

CHAINS = {
    "adaptive_tree": {},
    "dyspec": {},
    "c2t": {"mode": "chain"},
    "static_tree": {"shape": [1, 1, 1]},
    "mcsd": {"shape": [1, 1, 1]},
}


@pytest.mark.parametrize("method", CHAINS)
def test_methods_that_can_draft_chains(method):
    options = parsed(method, CHAINS[method])
    chains = as_chains(options)
    assert resolve(chains).chains
    assert resolve(chains).most == 1
    assert as_chains(chains) == chains
    assert chains.to_json() == {**options.to_json(), "tree": chains.to_json()["tree"]}


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ("adaptive_tree", "dyspec")])
def test_methods_that_branch_say_what_does_not(method):
    with pytest.raises(ValueError, match=f"'{method}' drafts branches, .* use 'adaptive_tree'"):
        as_chains(parsed(method))


def test_a_second_candidate_for_the_first_token_is_a_branch():
    with pytest.raises(ValueError, match="drafts branches"):
        as_chains(parsed("mcsd", {"shape": [1, 1], "init_width": 2, "allow_lossy": True}))


# -- pairs

LEGAL = {
    "adaptive_tree": ["target_only", "rrsw", "traversal"],
    "opt_tree": ["target_only", "traversal"],
    "dyspec": ["target_only", "rrsw", "traversal"],
    "c2t": ["target_only", "traversal"],
    "eagle2": ["target_only", "traversal"],
    "static_tree": ["target_only", "rrs", "rrsw", "greedy_multi_draft", "k_seq", "traversal"],
    "sequoia": ["target_only", "rrs", "rrsw", "greedy_multi_draft", "k_seq", "traversal"],
    "mcsd": ["target_only", "rrs", "rrsw", "greedy_multi_draft", "k_seq", "traversal"],
}
ILLEGAL = [(method, rule) for method in METHODS for rule in RULES if rule not in LEGAL[method]]


@pytest.mark.parametrize(("method", "rule"), [(method, rule) for method in METHODS for rule in LEGAL[method]])
def test_legal_pairs(method, rule, files):
    pair = resolve(parsed(method, files.get(method), rejection_sample_method=rule))
    assert pair.lossless
    assert (pair.rule_name, pair.rule) == (rule, RULES[rule])
    assert pair.proposer.kind in pair.rule.kinds
    assert pair.proposer.kind in pair.proposer.kinds


@pytest.mark.parametrize(("method", "rule"), ILLEGAL)
def test_illegal_pairs_are_refused_with_the_legal_rules(method, rule, files):
    tree = files.get(method, {})
    with pytest.raises(
        ValueError, match=rf"\['rejection_sample_method'\]: '{rule}' would change the target's distribution"
    ) as e:
        resolve(parsed(method, tree, rejection_sample_method=rule))
    listed = re.search(r"Use one of: auto, ([^;]*); or set tree: \{'allow_lossy': true\}", str(e.value))
    assert listed
    assert listed[1].split(", ") == LEGAL[method]
    pair = resolve(parsed(method, {**tree, "allow_lossy": True}, rejection_sample_method=rule))
    assert not pair.lossless
    assert (pair.rule_name, pair.proposer.kind in pair.proposer.kinds) == (rule, True)


def test_allow_lossy_leaves_a_lossless_pair_lossless():
    assert resolve(parsed("dyspec", {"allow_lossy": True}, rejection_sample_method="rrsw")).lossless


@pytest.mark.parametrize(
    ("method", "tree", "rule", "kind"),
    [
        ("opt_tree", {}, "target_only", "one_hot"),
        ("eagle2", {}, "target_only", "one_hot"),
        ("c2t", {}, "target_only", "one_hot"),
        ("dyspec", {}, "traversal", "without_replacement"),
        ("static_tree", {}, "traversal", "without_replacement"),
        ("sequoia", {}, "traversal", "without_replacement"),
        ("mcsd", {}, "traversal", "without_replacement"),
        ("static_tree", {"children": "top_k"}, "target_only", "one_hot"),
        ("mcsd", {"children": "iid"}, "traversal", "iid"),
        ("static_tree", {"shape": "binary", "children": "hub_pair"}, "traversal", "hub_pair"),
        ("sequoia", {"children": "top_k_plus_one"}, "traversal", "top_k_plus_one"),
        ("adaptive_tree", {}, "traversal", "without_replacement"),
    ],
)
def test_auto(method, tree, rule, kind, files):
    pair = resolve(parsed(method, {**files.get(method, {}), **tree}))
    assert pair.lossless
    assert (pair.rule_name, pair.proposer.kind) == (rule, kind)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("target_only", "without_replacement"),
        ("rrsw", "without_replacement"),
        ("rrs", "iid"),
        ("k_seq", "iid"),
        ("greedy_multi_draft", "top_k_plus_one"),
        ("spechub", "hub_pair"),
    ],
)
def test_the_rule_decides_how_a_static_tree_s_children_are_drawn(rule, kind):
    assert resolve(parsed("static_tree", {"shape": [2, 2]}, rejection_sample_method=rule)).proposer.kind == kind


@pytest.mark.parametrize(("children", "rule"), [("top_k", "rrsw"), ("iid", "rrsw"), ("without_replacement", "rrs")])
def test_named_children_do_not_change_for_a_rule(children, rule):
    with pytest.raises(ValueError, match=rf"'{rule}' would change.*Use one of: auto, target_only, "):
        resolve(parsed("static_tree", {"children": children}, rejection_sample_method=rule))


def test_spechub_takes_pairs_alone():
    for shape in ([3, 2], "eagle1", "ternary"):
        with pytest.raises(ValueError, match=r"'spechub'.*: it takes at most 2 children of a node\. Use one of: "):
            resolve(parsed("static_tree", {"shape": shape}, rejection_sample_method="spechub"))
    for shape in ([2, 2], "binary", [1, 1], [[0], [1], [0, 0]]):
        pair = resolve(parsed("static_tree", {"shape": shape}, rejection_sample_method="spechub"))
        assert (pair.lossless, pair.proposer.kind) == (True, "hub_pair")
    with pytest.raises(
        ValueError, match=r"'spechub'.*it is lossless for hub_pair children, and 'dyspec' drafts without"
    ):
        resolve(parsed("dyspec", rejection_sample_method="spechub"))


def test_initial_tokens_need_a_rule_that_walks():
    tree = {"init_width": 2, "allow_lossy": True}
    pair = resolve(parsed("mcsd", tree))
    assert (pair.rule_name, pair.init_width, pair.lossless) == ("rrsw", 2, False)
    with pytest.raises(ValueError, match="'traversal' accepts whole paths, but init_width=2 needs a rule that walks"):
        resolve(parsed("mcsd", tree, rejection_sample_method="traversal"))


# -- proposers


@pytest.mark.parametrize(("method", "tree", "nodes"), [("static_tree", {"shape": [2, 1]}, 4), ("opt_tree", {}, 9)])
def test_the_scheduler_reserves_what_a_proposer_can_draft(method, tree, nodes):
    options = parsed(method, tree, num_speculative_tokens=9)
    fitted = clamp_budget(options, resolve(options).proposer)
    assert fitted == replace(options, num_speculative_tokens=nodes)


def test_proposers_get_their_options(files):
    def built(method, **tree):
        return resolve(parsed(method, {**files.get(method, {}), **tree})).proposer

    opt_tree = built("opt_tree", max_depth=3, threshold=0.2)
    assert (type(opt_tree), opt_tree.max_depth, opt_tree.threshold) == (OptTree, 3, 0.2)
    assert built("opt_tree", threshold="auto").threshold == 0, "until it is measured, every level pays"
    dyspec = built("dyspec", max_depth=3, max_children=4, threshold=0.1)
    assert (type(dyspec), dyspec.max_depth, dyspec.max_children, dyspec.threshold) == (DySpec, 3, 4, 0.1)
    assert built("dyspec").threshold == 1 / 25
    assert built("dyspec", mode="heap", threshold=0.1).threshold == 0
    adaptive = built("adaptive_tree", max_depth=3, max_children=4, drawn_from=0.5)
    assert (type(adaptive), adaptive.max_depth, adaptive.max_children) == (AdaptiveTree, 3, 4)
    assert adaptive.children == "without_replacement children; below temperature 0.5 the draft's best"
    assert [adaptive.chooses(temperature) for temperature in (0, 0.4, 0.5)] == [True, True, False]
    eagle2 = built("eagle2", max_depth=3, top_k=4)
    assert (type(eagle2), eagle2.max_depth, eagle2.top_k) == (Eagle2, 3, 4)
    c2t = built("c2t", beta=0.3, top_k=4, entropy_top=9, max_depth=3, second_pruning=False)
    assert (type(c2t), c2t.beta, c2t.width, c2t.entropy_top, c2t.max_depth) == (C2T, 0.3, 4, 9, 3)
    assert not c2t.second_pruning
    assert built("c2t", mode="chain").width == 1
    mcsd = built("mcsd", shape=[3, 1], stop_threshold=0.7)
    assert (type(mcsd), mcsd.shape, mcsd.stop_threshold) == (Mcsd, Shape.k_config((3, 1)), 0.7)
    assert isinstance(mcsd.gate, Gate)
    assert built("mcsd", stop="none").gate is None


@pytest.mark.parametrize(
    ("shape", "nodes", "expected"),
    [
        ("eagle1", 60, Shape.named("eagle1", 60)),
        ("eagle1", 10, Shape.named("eagle1", 60).cut(10)),
        ("binary", 25, Shape.k_config((2, 2, 2, 2)).cut(25)),
        ("ternary", 12, Shape.k_config((3, 3))),
        ([4, 2, 2, 1], 60, Shape.k_config((4, 2, 2, 1))),
        ([4, 2, 2, 1], 9, Shape.k_config((4, 2, 2, 1)).cut(9)),
        ([[0, 0], [1], [0]], 60, Shape(((0,), (1,), (0, 0)))),
        ([1000] * 9, 30, Shape.k_config((30,))),  # in no time
    ],
)
def test_shapes_are_cut_to_the_budget(shape, nodes, expected):
    proposer = resolve(parsed("static_tree", {"shape": shape}, num_speculative_tokens=nodes)).proposer
    assert isinstance(proposer, StaticTree)
    assert proposer.shape == expected
    assert in_another_process(parsed("static_tree", {"shape": shape})) == parsed("static_tree", {"shape": shape})


def test_sequoia_s_shape(files):
    proposer = resolve(parsed("sequoia", {**files["sequoia"], "max_depth": 3}, num_speculative_tokens=9)).proposer
    assert (len(proposer.shape), proposer.shape.depth, proposer.max_children) == (9, 3, 3)


@pytest.mark.parametrize(
    ("method", "temperature", "greedy", "tree"),
    [
        ("adaptive_tree", 0.9, 0.6, {}),
        ("opt_tree", 0.9, 0.6, {}),
        ("opt_tree", 1.3, 1.3, {"draft_temperature": 1.3}),
        ("dyspec", 0.9, 0.6, {}),
        ("dyspec", 2.0, 2.0, {"draft_temperature": 2}),
        ("eagle2", 1.0, 1.0, {}),
        ("eagle2", 0.6, 0.6, {"draft_temperature": 0.6}),
        ("c2t", 1.0, 1.0, {}),
        ("c2t", 0.6, 0.6, {"draft_temperature": 0.6}),
        ("static_tree", 0.9, 1.0, {}),
        ("sequoia", 0.9, 1.0, {}),
        ("mcsd", 0.9, 1.0, {}),
    ],
)
def test_the_draft_s_temperature(method, temperature, greedy, tree):
    """Beside a request of temperature 0.9, and beside a greedy one."""
    options = parsed(method, tree)
    assert options.tree.temperature(0.9) == temperature
    assert options.tree.temperature(0.0) == greedy


@pytest.mark.parametrize(
    ("method", "tree", "file"),
    [
        ("c2t", {}, "c2t.safetensors"),
        ("sequoia", {}, "sequoia.json"),
        ("mcsd", {"stop": "type1"}, "mcsd-type1.safetensors"),
        ("mcsd", {"stop": "type2"}, "mcsd-type2.safetensors"),
    ],
)
def test_a_method_without_its_file_takes_the_bundled_one(method, tree, file):
    given = parsed(method, tree)
    default = given.tree.shipped()
    assert default is not None
    assert (default.name, default.is_file()) == (file, True)
    ours = resolve(given).proposer
    named = resolve(parsed(method, {**tree, "vector" if method == "sequoia" else "gate": str(default)})).proposer
    if method == "sequoia":
        assert ours.shape == named.shape
        assert len(ours.shape) == 25
    else:
        assert ours.gate.inputs == {"c2t": 3, "type1": 128, "type2": 11}[tree.get("stop", method)]
        for own, other in zip(ours.gate.parameters(), named.gate.parameters(), strict=True):
            assert own.equal(other)


@pytest.mark.parametrize(
    ("method", "tree"),
    [
        *[("opt_tree", {}), ("mcsd", {}), ("mcsd", {"gate": "mcsd.safetensors"}), ("c2t", {"gate": "c2t.safetensors"})],
        *[("mcsd", {"stop": "type2", "gate": "mcsd.safetensors"}), ("sequoia", {"vector": "vector.json"})],
    ],
)
def test_the_bundled_files_stand_in_for_missing_ones_alone(method, tree):
    assert parsed(method, tree).tree.shipped() is None


@pytest.mark.parametrize(
    ("method", "key", "tree"), [("c2t", "gate", {}), ("sequoia", "vector", {}), ("mcsd", "gate", {"stop": "type2"})]
)
def test_a_file_that_is_not_there(method, key, tree, tmp_path):
    for file in (str(tmp_path / "nowhere"), str(tmp_path)):
        with pytest.raises(ValueError, match=rf"\['tree'\]\['{key}'\]: there is no file '{re.escape(file)}'"):
            resolve(parsed(method, {**tree, key: file}))


def test_another_method_s_gate(files):
    with pytest.raises(ValueError, match=r"c2t\.safetensors' does not hold a gate of 11 features"):
        resolve(parsed("mcsd", {"stop": "type2", "gate": files["c2t"]["gate"]}))
    with pytest.raises(ValueError, match=r"mcsd\.safetensors' does not hold a gate of 3 features"):
        resolve(parsed("c2t", {"gate": files["mcsd"]["gate"]}))


@pytest.mark.parametrize(
    "text",
    [
        *["", "[0.5]", "{}", '{"vector": []}', '{"vector": 0.5}', '{"vector": [0.5, 1.5]}', '{"vector": [-0.1]}'],
        *['{"vector": ["0.5"]}', '{"vector": [NaN]}', '{"vector": null}', '{"vector": {"a": 1}}'],
    ],
)
def test_another_file_than_a_vector(text, tmp_path):
    file = tmp_path / "vector.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"vector\.json' must hold \{\"vector\": \[numbers between 0 and 1\]\}"):
        resolve(parsed("sequoia", {"vector": str(file)}))


def test_a_file_that_is_no_text_at_all(tmp_path):
    (tmp_path / "vector.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="must hold"):
        resolve(parsed("sequoia", {"vector": str(tmp_path / "vector.json")}))


def test_the_user_s_home(tmp_path, monkeypatch, files):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(parsed("sequoia", {"vector": "~/vector.json"})).lossless
