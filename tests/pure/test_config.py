"""Options of a user in `speculative_config`, which arrive unchanged in another process."""

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from vllm_adaptive_tree.acceptance import RULES
from vllm_adaptive_tree.config import OUR_KEYS, VLLM_KEYS, TextDraft, TreeOptions, is_tree_method
from vllm_adaptive_tree.drafters import DRAFT_KINDS, DRAFTERS
from vllm_adaptive_tree.drafters.ngram import NGram
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers import METHODS, PROPOSERS

ALL = {"allow_lossy": False, "budget": "auto", "cost_profile": "auto"}
SHAPED = {**ALL, "children": None}
DEFAULTS = {
    "adaptive_tree": {**ALL, "max_depth": 10, "max_children": 16, "drawn_from": 0.4},
    "opt_tree": {**ALL, "max_depth": 10, "threshold": None, "draft_temperature": "auto"},
    "dyspec": {**ALL, "mode": "threshold", "threshold": "auto", "draft_temperature": "auto"}
    | {"max_children": 16, "max_depth": 16},
    "c2t": {**ALL, "beta": 0.5, "top_k": 15, "entropy_top": 1000, "max_depth": 10}
    | {"second_pruning": True, "mode": "tree", "gate": None, "draft_temperature": 1.0},
    "eagle2": {**ALL, "top_k": 10, "max_depth": 6, "draft_temperature": 1.0},
    "static_tree": {**SHAPED, "shape": "eagle1"},
    "sequoia": {**SHAPED, "vector": None, "max_depth": 10},
    "mcsd": {**SHAPED, "shape": (4, 2, 2, 1), "init_width": 1} | {"stop": "none", "stop_threshold": 0.4, "gate": None},
}
OTHER_VALUES = {  # of every option another legal value
    "adaptive_tree": {"max_depth": 3, "max_children": 4, "drawn_from": 0.5},
    "opt_tree": {"max_depth": 3, "threshold": "auto", "draft_temperature": 1.5, "allow_lossy": True}
    | {"budget": None, "cost_profile": None},
    "dyspec": {"mode": "heap", "threshold": 0, "draft_temperature": 1, "max_children": 4, "max_depth": 5},
    "c2t": {"beta": 1, "top_k": 4, "entropy_top": 10, "max_depth": 3}
    | {"second_pruning": False, "mode": "chain", "gate": "c2t.safetensors", "draft_temperature": 0.6},
    "eagle2": {"top_k": 3, "max_depth": 2, "draft_temperature": 0.6},
    "static_tree": {"shape": [[0], [1], [0, 0]], "children": "iid"},
    "sequoia": {"vector": "chances.json", "max_depth": 4, "children": "top_k"},
    "mcsd": {"shape": [3, 1, 1], "stop": "type2", "stop_threshold": 0, "gate": "mcsd.safetensors"},
}
EVERY_METHOD = pytest.mark.parametrize("method", METHODS)


def config(method: str, tree: dict | None = None, **keys) -> dict:
    return {"method": method, "model": "draft", "num_speculative_tokens": 25, "tree": tree or {}, **keys}


def parsed(method: str, tree: dict | None = None, **keys) -> TreeOptions:
    return TreeOptions.parse(config(method, tree, **keys))[0]


def in_another_process(options: TreeOptions) -> TreeOptions:
    return TreeOptions.from_json(json.loads(json.dumps(options.to_json())))


def test_the_methods():
    assert set(METHODS) == set(DEFAULTS)
    assert all(is_tree_method({"method": method}) for method in METHODS)
    for other in ("eagle", "ngram", "draft_model", None, 3):
        assert not is_tree_method({"method": other})
    assert not is_tree_method({})
    assert not is_tree_method("opt_tree")


@EVERY_METHOD
def test_defaults(method):
    options = parsed(method)
    assert options == parsed(method, tree=None)
    assert options.rejection_sample_method == "auto"
    assert options.num_speculative_tokens == 25
    assert options.to_json()["tree"] == DEFAULTS[method]


@EVERY_METHOD
def test_every_option_arrives(method):
    given = OTHER_VALUES[method]
    options = parsed(method, given)
    assert {key: getattr(options.tree, key) for key in given} == {
        **given,
        **(
            {"shape": tuple(tuple(x) if isinstance(x, list) else x for x in given["shape"])} if "shape" in given else {}
        ),
    }
    assert all(given[key] != DEFAULTS[method][key] for key in given)


@EVERY_METHOD
def test_options_travel_as_json(method):
    for tree in ({}, OTHER_VALUES[method]):
        options = parsed(method, tree, rejection_sample_method="target_only", num_speculative_tokens=7)
        assert in_another_process(options) == options
        assert in_another_process(in_another_process(options)) == options


BOUNDS = {
    ("adaptive_tree", "drawn_from"): (0, 100),
    ("opt_tree", "threshold"): (0, 1),
    ("opt_tree", "draft_temperature"): (0.01, 100),
    ("dyspec", "threshold"): (0, 1),
    ("dyspec", "draft_temperature"): (0.01, 100),
    ("c2t", "beta"): (0, 1),
    ("c2t", "draft_temperature"): (0.01, 100),
    ("eagle2", "draft_temperature"): (0.01, 100),
    ("mcsd", "stop_threshold"): (0, 1),
    ("suffix", "suffix_decoding_max_spec_factor"): (0.01, 100),
    ("suffix", "suffix_decoding_min_token_prob"): (0, 1),
}
"""Of every option that is no whole number; those of drafts without a checkpoint by the draft."""
EXTREMES = [0, -0.0, 5e-324, 1e-310, 1e-300, 1e-45, 1e45, 1e300, 10**400, -(10**400), -1, -1e-300]
EXTREMES += [float("inf"), float("-inf"), float("nan")]
CLASSES = {name: PROPOSERS[name].Options for name in PROPOSERS.built_in}
CLASSES |= {name: DRAFTERS[name].Options for name in DRAFTERS.built_in}


def test_every_float_option_has_bounds():
    floats = {(name, one.name) for name, cls in CLASSES.items() for one in fields(cls) if "float" in str(one.type)}
    assert floats == set(BOUNDS)


@pytest.mark.parametrize(("name", "key"), BOUNDS)
def test_floats_that_the_arithmetic_does_not_survive(name, key):
    least, most = BOUNDS[name, key]
    for value in (least, most, (least + most) / 2, 1, *EXTREMES, least - 1e-9, most + 1e-9):
        if least <= value <= most:
            assert getattr(CLASSES[name](**{key: value}), key) == value
            continue
        with pytest.raises(ValueError, match=rf"\['{key}'\] must be a number between .*, got "):
            CLASSES[name](**{key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num-speculative-tokens": 3},
            r"^speculative_config has 'num_speculative_tokens' and 'num-speculative-tokens', ",
        ),
        (
            {"tree": {"max-depth": 3, "max_depth": 3}},
            r"\['tree'\] has 'max-depth' and 'max_depth', two spellings of one",
        ),
        ({3: "three"}, r"^speculative_config: the key 3 is no text; give the name of an option in its place"),
        ({"tree": {None: 3}}, r"\['tree'\]: the key None is no text"),
        ({"tree": '{"max_depth": 3}'}, r"""\['tree'\] must be a mapping of options, got '{"max_depth": 3}'"""),
    ],
)
def test_keys_that_are_no_names_or_given_twice(change, message):
    with pytest.raises(ValueError, match=message):
        TreeOptions.parse({**config("opt_tree"), **change})


def test_keys_may_carry_dashes():
    options, rest = TreeOptions.parse(
        {
            "method": "opt_tree",
            "model": "draft",
            "num-speculative-tokens": 3,
            "tree": {"max-depth": 2},
            "max-model-len": 9,
        }
    )
    assert (options.num_speculative_tokens, options.tree.max_depth) == (3, 2)
    assert rest == {"model": "draft", "max_model_len": 9}


def test_vllm_s_keys_go_on():
    theirs = {key: f"value of {key}" for key in VLLM_KEYS}
    assert TreeOptions.parse(config("dyspec", **theirs))[1] == {"model": "draft", **theirs}


def test_an_unknown_method_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=rf"\['method'\]: 'opt_bush' is no tree method; use one of {', '.join(METHODS)}"
    ):
        TreeOptions.parse(config("opt_bush"))


def test_unknown_keys_list_the_known_ones():
    with pytest.raises(
        ValueError, match=r"\['use_local_argmax_reduction'\] has no meaning with method 'eagle2'; remove it"
    ) as e:
        parsed("eagle2", use_local_argmax_reduction=3)
    assert all(key in str(e.value) for key in (*OUR_KEYS, *VLLM_KEYS))


@EVERY_METHOD
def test_unknown_tree_keys_list_the_known_ones(method):
    with pytest.raises(
        ValueError, match=rf"\['tree'\]\['depht'\] is not an option of '{method}'; known options: "
    ) as e:
        parsed(method, {"depht": 3})
    known = str(e.value).rsplit(": ", 1)[1].split(", ")
    look_up = {"prompt_lookup_min", "prompt_lookup_max"} if method == "adaptive_tree" else set()  # by default
    assert set(known) == {"draft", "lookup", *DEFAULTS[method]} | look_up


def test_the_budget_of_a_batch():
    assert parsed("dyspec").tree.budget == "auto"
    assert parsed("dyspec", {"budget": None}).tree.budget is None
    assert parsed("dyspec", {"cost_profile": "costs.json"}).tree.cost_profile == "costs.json"
    assert parsed("eagle2", {"budget": 40}).tree.budget == 40
    for wrong in (0, -1, 1.5, "some", True):
        with pytest.raises(ValueError, match=r"\['budget'\] must be 'auto' or a whole number of at least 1"):
            parsed("opt_tree", {"budget": wrong})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, r"\['model'\] is missing: method 'dyspec' needs the draft$"),
        ({"model": ""}, r"\['model'\] must name the draft, got ''"),
        ({"model": 3}, r"\['model'\] must name the draft, got 3"),
        ({"num_speculative_tokens": None}, r"\['num_speculative_tokens'\] is missing.*25 for example"),
        ({"num_speculative_tokens": 0}, r"\['num_speculative_tokens'\].*whole number of at least 1.*got 0"),
        ({"num_speculative_tokens": True}, r"\['num_speculative_tokens'\].*got True"),
        ({"num_speculative_tokens": 2.5}, r"\['num_speculative_tokens'\].*got 2.5"),
        ({"num_speculative_tokens": "9"}, r"\['num_speculative_tokens'\].*got '9'"),
        ({"tree": [1]}, r"\['tree'\] must be a mapping of options, got \[1\]"),
        ({"tree": None}, r"\['tree'\] must be a mapping of options, got None"),
        ({"rejection_sample_method": "best"}, r"\['rejection_sample_method'\] must be one of auto, .*rrsw.*got 'best'"),
        ({"rejection_sample_method": None}, r"\['rejection_sample_method'\] must be one of auto, .*got None"),
        ({"rejection_sample_method": ["rrs"]}, r"\['rejection_sample_method'\] must be one of auto"),
        ({"rejection_sample_method": "standard"}, r"'standard' is vLLM's rule.*remove the key or use one of auto"),
        ({"rejection_sample_method": "synthetic"}, r"'synthetic' is vLLM's rule"),
        ({"rejection_sample_method": "block"}, r"'block' is vLLM's rule"),
        ({"rejection_sample_method": "fly"}, r"'fly' is vLLM's rule"),
    ],
)
def test_bad_keys(change, message):
    given = {key: value for key, value in {**config("dyspec"), **change}.items() if value is not None or key != "model"}
    with pytest.raises(ValueError, match=message):
        TreeOptions.parse(given)


COUNTS = [0, -1, 2.0, "3", None, True, 1 << 31]
SHARES = [-0.1, 1.1, "0.5", None, True, float("nan")]
BAD_VALUES = {
    ("adaptive_tree", "max_depth", "whole number of at least 1"): COUNTS,
    ("adaptive_tree", "max_children", "whole number of at least 1"): COUNTS,
    ("adaptive_tree", "drawn_from", r"a number between 0 and 100 \(a temperature\)"): [-0.1, "auto", None, True],
    ("opt_tree", "max_depth", "whole number of at least 1"): COUNTS,
    ("opt_tree", "threshold", r"a number between 0 and 1 \(tokens gained per level\) or 'auto' or null"): [
        *[-0.1, "fast", True, []]
    ],
    ("opt_tree", "draft_temperature", "a number between 0.01 and 100 or 'auto'"): [0, -1, "hot", None, True],
    ("opt_tree", "allow_lossy", "true or false"): [1, "true", None],
    ("dyspec", "mode", "one of 'threshold', 'heap'"): ["greedy", None, 3, ["heap"]],
    ("dyspec", "threshold", "a number between 0 and 1"): [-0.1, "heap", None],
    ("dyspec", "draft_temperature", "a number between 0.01 and 100 or 'auto'"): [0, "hot", None],
    ("dyspec", "max_children", "whole number of at least 1"): COUNTS,
    ("dyspec", "max_depth", "whole number of at least 1"): COUNTS,
    ("c2t", "beta", "a number between 0 and 1"): SHARES,
    ("c2t", "top_k", "whole number of at least 1"): COUNTS,
    ("c2t", "entropy_top", "whole number of at least 1"): COUNTS,
    ("c2t", "max_depth", "whole number of at least 1"): COUNTS,
    ("c2t", "second_pruning", "true or false"): [0, "no", None],
    ("c2t", "mode", "one of 'tree', 'chain'"): ["threshold", None, {}],
    ("c2t", "gate", "the path of a file"): ["", 3, ["gate"]],
    ("c2t", "draft_temperature", "a number between 0.01 and 100"): [0, "auto", None, True],
    ("eagle2", "draft_temperature", "a number between 0.01 and 100"): [0, "auto", None, True],
    ("eagle2", "top_k", "whole number of at least 1"): COUNTS,
    ("eagle2", "max_depth", "whole number of at least 1"): COUNTS,
    ("static_tree", "shape", "'eagle1', 'binary', 'ternary', a k-config as .* or rank paths as"): [
        *["eagle2", 3, None, [], (), [4, 0], [4, 2.0], [True], [1, [0]], [[0], "1"], [[0], [-1]], [["0"]], {}]
    ],
    ("static_tree", "children", "one of 'top_k', 'without_replacement', 'iid', 'hub_pair', 'top_k_plus_one'"): [
        *["best", "one_hot", ["iid"], {}]
    ],
    ("sequoia", "vector", "the path of a file"): ["", [0.5, 0.3]],
    ("sequoia", "max_depth", "whole number of at least 1"): COUNTS,
    ("sequoia", "children", "one of 'top_k'"): ["best"],
    ("mcsd", "shape", "a k-config as"): ["eagle1", [], [[0], [1]], [2, 0], 3, None],
    ("mcsd", "init_width", "whole number of at least 1"): COUNTS,
    ("mcsd", "stop", "one of 'none', 'type1', 'type2'"): ["type3", None, 2],
    ("mcsd", "stop_threshold", "a number between 0 and 1"): SHARES,
    ("mcsd", "gate", "the path of a file"): ["", 3],
    ("mcsd", "children", "one of 'top_k'"): ["best"],
}


@pytest.mark.parametrize(("option", "values"), BAD_VALUES.items(), ids=[f"{x[0]}-{x[1]}" for x in BAD_VALUES])
def test_bad_values_name_the_option_and_what_it_must_be(option, values):
    method, key, what = option
    for value in values:
        with pytest.raises(
            ValueError, match=rf"\['tree'\]\['{key}'\] must be .*{what}.*, got {re.escape(repr(value))}"
        ):
            parsed(method, {key: value})


def test_no_option_is_left_unchecked():
    elsewhere = {(method, key) for method in METHODS for key in ALL}
    options = {(method, key) for method in METHODS for key in DEFAULTS[method]}
    assert {(method, key) for method, key, _ in BAD_VALUES} | elsewhere == options


@EVERY_METHOD
@pytest.mark.parametrize("kind", [None, *DRAFT_KINDS])
def test_the_kind_of_draft_may_be_said(method, kind):
    options = parsed(method, {"draft": kind})
    assert (options.draft, options.text) == (kind, None)
    assert in_another_process(options) == options


def test_a_draft_without_a_checkpoint(tmp_path, monkeypatch):
    for tree in ({}, {"draft": "ngram"}):
        options = parsed("opt_tree", {**tree, "prompt_lookup_max": 6}, model="ngram")
        assert (options.draft, options.text.options.prompt_lookup_max) == ("ngram", 6)
        assert in_another_process(options) == options
    monkeypatch.chdir(tmp_path)
    assert [parsed("opt_tree", tree, model="ngram").tree.max_depth for tree in ({}, {"max_depth": 3})] == [16, 3]
    assert parsed("dyspec", {"max_depth": 20}, model="ngram").tree.max_depth == 20
    keys = {"method": "opt_tree", "num_speculative_tokens": 25, "tree": {"draft": "ngram"}}
    assert TreeOptions.parse(keys)[1] == {"model": "ngram"}, "one name is enough"
    (tmp_path / "ngram").mkdir()
    assert parsed("opt_tree", model="ngram").text is not None, "a folder of that name may be the draft's package"
    (tmp_path / "ngram" / "config.json").touch()
    assert parsed("opt_tree", model="ngram").text is None, "a checkpoint of that name comes first"
    assert parsed("opt_tree", {"draft": "ngram"}, model="ngram").text is not None


def test_mtp_layers_may_be_the_target_s():
    keys = {"method": "opt_tree", "num_speculative_tokens": 25, "tree": {"draft": "mtp"}}
    assert TreeOptions.parse(keys)[1] == {}
    assert TreeOptions.parse({**keys, "model": "draft"})[1] == {"model": "draft"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tree": {"draft": "beagle"}},
            r"\['draft'\] must be one of model, eagle, eagle3, mtp, peagle, dflash, dflash2, lilicorr, dspark, xpress",
        ),
        ({"tree": {"draft": ["eagle"]}}, r"\['draft'\] must be one of .*, got \['eagle'\]"),
        ({"tree": {"draft": "ngram"}}, r"'ngram', which has no checkpoint: give 'model' as 'ngram' too, not 'draft'"),
        ({"tree": {"draft": "mlp_speculator"}}, r"\['draft'\] asks for an MLP speculator, not served; .* P-EAGLE head"),
        (
            {"tree": {"draft": "medusa"}},
            r"asks for Medusa heads, which vLLM 0\.33 has removed, not served; this release",
        ),
        ({"model": "mlp_speculator"}, r"\['model'\] asks for an MLP speculator, not served; .* 'ngram' or 'suffix'"),
        (
            {"parallel_drafting": True},
            r"\['parallel_drafting'\] is of vLLM's chains; remove it: .* PARD drafts are not served yet; this release",
        ),
    ],
)
def test_drafts_that_are_not_served(change, message):
    with pytest.raises(ValueError, match=message):
        TreeOptions.parse({**config("opt_tree"), **change})


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([[0], [1, 0]], r"\[1, 0\] has no parent \[1\]; add it"),
        ([[0], [2]], r"\[2\] needs its earlier sibling \[1\]; add it"),
        ([[0], [0]], r"\[0\] is empty or listed twice"),
    ],
)
def test_a_shape_with_a_hole_names_the_path(shape, message):
    with pytest.raises(ValueError, match=message):
        parsed("static_tree", {"shape": shape})


@pytest.mark.parametrize("budget", [None, 8])
def test_a_cost_profile_that_nothing_would_read(budget):
    with pytest.raises(ValueError, match=r"\['cost_profile'\] is read and written with budget 'auto' only"):
        parsed("opt_tree", {"budget": budget, "cost_profile": "costs.json"})
    assert parsed("opt_tree", {"budget": budget, "cost_profile": None}).tree.budget == budget


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"init_width": 2}, r"\['init_width'\]=2 changes the output.*use init_width 1.*allow_lossy"),
    ],
)
def test_what_mcsd_lacks(tree, message):
    with pytest.raises(ValueError, match=message):
        parsed("mcsd", tree)


def test_configuring_does_not_import_vllm():
    check = "import sys, vllm_adaptive_tree.methods; sys.exit('vllm' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_adaptive_trees_merge_a_look_up_by_default():
    """Drawn children stay as they are, so the rule does, too."""
    options = parsed("adaptive_tree")
    assert options.lookup == TextDraft(DRAFTERS.paths["ngram"], NGram.Options(), by_default=True)
    assert TreeOptions.from_json(json.loads(json.dumps(options.to_json()))) == options
    pair = resolve(options)
    assert (pair.rule_name, pair.proposer.kind, pair.looks_up) == ("traversal", "without_replacement", False)
    assert parsed("adaptive_tree", {"lookup": None}).lookup is None
    assert not parsed("adaptive_tree", {"lookup": "ngram"}).lookup.by_default
    assert parsed("opt_tree").lookup is None


@pytest.mark.parametrize(
    ("method", "rule", "found"),
    [
        ("adaptive_tree", "auto", ("target_only", True)),
        ("opt_tree", "auto", ("target_only", True)),
        ("opt_tree", "traversal", ("traversal", False)),
        ("adaptive_tree", "traversal", ("traversal", False)),
        ("dyspec", "auto", ("traversal", False)),
        ("static_tree", "target_only", ("target_only", False)),
    ],
)
def test_a_look_up_is_the_whole_tree_of_methods_that_take_the_best_nodes(method, rule, found):
    pair = resolve(parsed(method, model="ngram", rejection_sample_method=rule))
    assert (pair.rule_name, pair.looks_up) == found


def test_a_look_up_is_merged_where_the_rule_samples_from_the_target():
    options = parsed("opt_tree", {"lookup": "ngram", "prompt_lookup_min": 2})
    assert options.lookup.options == NGram.Options(prompt_lookup_min=2)
    assert TreeOptions.from_json(json.loads(json.dumps(options.to_json()))) == options
    assert resolve(options).rule_name == "target_only"
    options = parsed("dyspec", {"lookup": "ngram"}, rejection_sample_method="traversal")
    with pytest.raises(ValueError, match=r"\['lookup'\]: 'traversal' has to know .* set 'rejection_sample_method'"):
        resolve(options)
    for rule in ("auto", "target_only"):
        pair = resolve(parsed("dyspec", {"lookup": "ngram"}, rejection_sample_method=rule))
        assert (pair.rule_name, pair.rule) == ("target_only", RULES["target_only"])
    assert resolve(parsed("dyspec")).rule_name == "traversal"
    with pytest.raises(ValueError, match=r"\['lookup'\] must be one of ngram, suffix, got 'eagle3'"):
        parsed("opt_tree", {"lookup": "eagle3"})
    with pytest.raises(ValueError, match="'prompt_lookup_min'] is an option of a look-up"):
        parsed("opt_tree", {"prompt_lookup_min": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_lookup_max": 8}, r"\['prompt_lookup_max'\] belongs into 'tree'"),
        ({"lookup": "ngram"}, r"\['lookup'\] belongs into 'tree'"),
        ({"tree": {"prompt_lookup_max": 8}}, r"\['prompt_lookup_max'\] is an option of a look-up: give 'model' or"),
        ({"model": "ngram", "tree": {"lookup": "ngram"}}, r"\['lookup'\] is the draft itself; remove it"),
    ],
)
def test_where_options_of_look_ups_belong(change, message):
    with pytest.raises(ValueError, match=message):
        TreeOptions.parse({**config("opt_tree"), **change})


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("opt_tree", {"threshold": 0.2}, r"speculative_config\['threshold'\] belongs into 'tree': move it there"),
        ("opt_tree", {"budget": 8}, r"\['budget'\] belongs into 'tree'"),
        ("c2t", {"second-pruning": False}, r"\['second_pruning'\] belongs into 'tree'"),
        ("opt_tree", {"second_pruning": False}, r"\['second_pruning'\] has no meaning with method 'opt_tree'; remove"),
        ("opt_tree", {"num_speculative_token": 8}, r"did you mean 'num_speculative_tokens'\? Known keys: method, "),
        ("opt_tree", {"treshold": 0.2}, r"\['treshold'\] has no .*; did you mean 'threshold', in tree\? Known keys"),
        (
            "opt_tree",
            {"tree": {"treshold": 0.2}},
            r"\['treshold'\] is not .*; did you mean 'threshold'\? known options",
        ),
        ("eagle2", {"tree": {"topk": 8}}, r"; did you mean 'top_k'\? known options"),
        ("eagle2", {"tree": {"quantization": "fp8"}}, r"\['quantization'\] belongs beside 'method', not into 'tree'"),
    ],
)
def test_a_key_in_the_wrong_place_or_mistyped(method, change, message):
    with pytest.raises(ValueError, match=message):
        TreeOptions.parse({**config(method), **change})


def test_a_module_that_a_draft_needs(monkeypatch):
    monkeypatch.setattr("vllm_adaptive_tree.config.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"\['model'\] needs the module 'arctic_inference', .*\[suffix\]'"):
        parsed("opt_tree", model="suffix")
    with pytest.raises(ValueError, match=r"\['tree'\]\['lookup'\] needs the module 'arctic_inference'"):
        parsed("opt_tree", {"lookup": "suffix"})
