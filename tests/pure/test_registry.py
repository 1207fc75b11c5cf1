"""Proposers and rules of third parties."""

import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

import vllm_adaptive_tree
from vllm_adaptive_tree import register, registry
from vllm_adaptive_tree.acceptance import RULES, Rule, TargetOnly
from vllm_adaptive_tree.acceptance.hub import SpecHub
from vllm_adaptive_tree.config import is_tree_method
from vllm_adaptive_tree.drafters import DRAFTERS, Lookup
from vllm_adaptive_tree.engine.common.threshold_controller import ThresholdController
from vllm_adaptive_tree.methods import resolve
from vllm_adaptive_tree.proposers import METHODS, PROPOSERS, MethodOptions, Steered, option
from vllm_adaptive_tree.proposers.eagle2 import Eagle2
from vllm_adaptive_tree.proposers.opt_tree import OptTree

from .test_config import in_another_process, parsed


@dataclass(frozen=True, kw_only=True)
class MyOptions(MethodOptions):
    levels: int = option(2, lambda value: value in range(1, 9), "a whole number from 1 to 8")
    widths: tuple[int, ...] = option((), lambda value: isinstance(value, list | tuple), "a list")

    @property
    def steered(self) -> Steered:
        return Steered(fill=True)

    def temperature(self, own: float, fitted: float = 0.6) -> float:
        return 0.25

    def shipped(self) -> Path | None:
        return Path("mine.json")


class Mine(OptTree):
    """A proposer of a third party; it lives in an importable module."""

    Options = MyOptions

    @classmethod
    def build(cls, options: MyOptions, *, nodes: int) -> "Mine":
        mine = cls(max_depth=options.levels, threshold=0.0)
        mine.widths, mine.fills = options.widths, []
        return mine

    def steer(self, fill: float) -> None:
        self.fills.append(fill)


class Outer:
    class Inner(Eagle2):
        pass


class MyRule(Rule):
    kinds = ("one_hot",)
    draw = TargetOnly.draw


class PairRule(SpecHub):
    pass


class MyDraft(Lookup):
    @classmethod
    def build(cls, options, *, vocabulary):
        return cls(vocabulary)

    def continuations(self, texts):
        raise NotImplementedError


class HalfADraft(Lookup):
    pass


HERE = __name__


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    """As in the engine's processes."""
    for one in (PROPOSERS, RULES, DRAFTERS):
        monkeypatch.setattr(one, "registered", {})


@pytest.mark.parametrize("what", [Mine, f"{HERE}:Mine"])
def test_a_registered_proposer_works_by_class_and_by_path(what, monkeypatch):
    assert not is_tree_method({"method": "mine"})
    register("mine", what)
    assert is_tree_method({"method": "mine"})
    options = parsed("mine", {"levels": 4, "widths": [2, 1], "allow_lossy": True})
    assert options.tree.allow_lossy
    assert (options.tree.levels, options.tree.widths) == (4, (2, 1))
    monkeypatch.setattr(PROPOSERS, "registered", {})
    proposer = resolve(in_another_process(options)).proposer
    assert (type(proposer), proposer.max_depth, proposer.widths) == (Mine, 4, (2, 1))
    assert in_another_process(options) == options


def test_a_nested_class_is_importable():
    register("inner", Outer.Inner)
    assert parsed("inner").proposer == f"{HERE}:Outer.Inner"
    assert isinstance(resolve(parsed("inner", {"max_depth": 2, "top_k": 2})).proposer, Outer.Inner)


def test_a_registered_rule_works_in_another_process(monkeypatch):
    register("my_rule", f"{HERE}:MyRule")
    options = parsed("opt_tree", rejection_sample_method="my_rule")
    assert resolve(options).rule == MyRule
    monkeypatch.setattr(RULES, "registered", {})
    pair = resolve(in_another_process(options))
    assert (pair.rule_name, pair.rule, pair.lossless) == ("my_rule", MyRule, True)
    with pytest.raises(ValueError, match="must be one of"):
        parsed("opt_tree", rejection_sample_method="my_rule")


def test_a_registered_rule_is_held_to_its_kinds():
    register("my_rule", f"{HERE}:MyRule")
    register("my_pairs", f"{HERE}:PairRule")
    with pytest.raises(ValueError, match=r"'my_rule'.*lossless for one_hot children, and 'dyspec' drafts without_repl"):
        resolve(parsed("dyspec", rejection_sample_method="my_rule"))
    with pytest.raises(ValueError, match=r"'my_pairs'.*at most 2 children.*Use one of: auto, .*traversal, my_rule;"):
        resolve(parsed("static_tree", rejection_sample_method="my_pairs"))
    assert (
        resolve(parsed("static_tree", {"shape": [2]}, rejection_sample_method="my_pairs")).proposer.kind == "hub_pair"
    )


def test_what_no_other_process_can_import_is_refused():
    class Local:
        pass

    main = type("Script", (), {"__module__": "__main__"})
    for what in (Local, lambda: None, main, Mine(max_depth=1, threshold=0.0), "__main__:Script"):
        with pytest.raises(ValueError, match=r"cannot be imported in the engine's processes.*put it into a module"):
            register("name", what)
    assert not PROPOSERS.registered
    assert not RULES.registered


@pytest.mark.parametrize("path", ["no.such.module:X", f"{HERE}:Nothing", HERE, ":X", "", ".relative:X", f"{HERE}.Mine"])
def test_a_path_to_nothing_is_refused(path):
    with pytest.raises(ValueError, match=rf"'{re.escape(path)}' cannot be imported here"):
        register("name", path)


def test_a_class_that_its_module_does_not_hold_is_refused():
    hidden = type("Hidden", (), {"__module__": HERE})
    with pytest.raises(ValueError, match=r":Hidden' cannot be imported here \(AttributeError"):
        register("hidden", hidden)


def test_taken_names_are_refused():
    for method in METHODS:
        with pytest.raises(ValueError, match=rf"register: '{method}' is built in; choose another name"):
            register(method, Mine)
    for rule in ("auto", *RULES, "standard", "block"):
        with pytest.raises(ValueError, match=rf"register: '{rule}' is built in; choose another name"):
            register(rule, f"{HERE}:MyRule")
    for draft in ("ngram", "eagle3"):
        with pytest.raises(ValueError, match=rf"register: '{draft}' is built in; choose another name"):
            register(draft, MyDraft)
    register("mine", Mine)
    register("mine", f"{HERE}:Mine")  # once more the same
    with pytest.raises(ValueError, match=r"register: 'mine' is '.*:Mine' already; choose another name"):
        register("mine", Outer.Inner)


def test_options_of_a_third_party_are_checked_like_ours():
    register("mine", Mine)
    with pytest.raises(ValueError, match=r"\['tree'\]\['levels'\] must be a whole number from 1 to 8, got 9"):
        parsed("mine", {"levels": 9})
    with pytest.raises(ValueError, match=r"\['tree'\]\['depth'\] is not an option of 'mine'; known options: .*levels"):
        parsed("mine", {"depth": 9})


def test_what_the_engine_asks_a_third_party():
    register("mine", Mine)
    options = parsed("mine", {"levels": 3})
    proposer = resolve(options).proposer
    assert (options.tree.temperature(1.0), options.tree.shipped()) == (0.25, Path("mine.json"))
    steering = ThresholdController(proposer, options.tree.steered)
    steering.grown(6, 8)
    assert proposer.fills == [0.75]
    assert proposer.for_cpu() is proposer, "no other class stands in for a subclass"


def test_the_base_class_tells_what_is_registered():
    for what in (Mine, MyRule, MyDraft):
        register("same", what)
    assert (PROPOSERS["same"], RULES["same"], DRAFTERS["same"]) == (Mine, MyRule, MyDraft)
    assert len(PROPOSERS) == len(METHODS) + 1
    with pytest.raises(KeyError):
        PROPOSERS["another"]


def test_a_thing_of_another_sort_is_refused():
    for what in ("Outer", "HERE"):
        with pytest.raises(
            ValueError, match=rf"derive '{HERE}:{what}' from .* Proposer, Rule, TextDrafter or DraftKind"
        ):
            register("name", f"{HERE}:{what}")
    with pytest.raises(ValueError, match=r"is no drafter yet: it does not define build, continuations"):
        register("name", HalfADraft)
    with pytest.raises(ValueError, match=r":MyRule' is no proposer: derive it from vllm_adaptive_tree.proposers.Prop"):
        PROPOSERS.load(f"{HERE}:MyRule")


def test_a_rule_says_its_kinds_and_how_it_draws():
    with pytest.raises(TypeError, match=r"rule Bad: kinds must be a tuple of one_hot, .*, got \('sampled',\)"):
        type("Bad", (Rule,), {"kinds": ("sampled",), "draw": TargetOnly.draw})
    with pytest.raises(TypeError, match=r"rule Bad: kinds must be a tuple of .*, got \(\)"):
        type("Bad", (Rule,), {"draw": TargetOnly.draw})
    with pytest.raises(TypeError, match=r"rule Bad does not define draw\(p, q, children, rng\)"):
        type("Bad", (Rule,), {"kinds": ("iid",)})


def installed(monkeypatch, **groups: dict[str, str]) -> None:
    found = {f"vllm_adaptive_tree.{group}": named for group, named in groups.items()}
    monkeypatch.setattr(registry, "installed", lambda group: found.get(group, {}))


def test_entry_points_are_read(monkeypatch):
    point = EntryPoint("theirs", f"{HERE}:Mine", group="some.group")
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints([point]).select(group=group))
    assert registry.installed("some.group") == {"theirs": f"{HERE}:Mine"}
    assert registry.installed("another.group") == {}


def test_installed_packages_are_found(monkeypatch):
    assert tuple(PROPOSERS) == METHODS
    assert tuple(RULES) == tuple(RULES.built_in)
    installed(monkeypatch, proposers={"theirs": f"{HERE}:Mine"}, acceptance={"their_rule": f"{HERE}:MyRule"})
    assert is_tree_method({"method": "theirs"})
    assert not is_tree_method({"method": "their_rule"})
    options = parsed("theirs", {"levels": 2}, rejection_sample_method="their_rule")
    assert (options.proposer, options.acceptance) == (f"{HERE}:Mine", f"{HERE}:MyRule")
    pair = resolve(in_another_process(options))
    assert (type(pair.proposer), pair.rule, pair.lossless) == (Mine, MyRule, True)
    with pytest.raises(ValueError, match=r"must be one of auto, .*their_rule, got 'other'"):
        parsed("theirs", rejection_sample_method="other")


def test_what_is_registered_here_goes_before_what_is_installed(monkeypatch):
    installed(monkeypatch, proposers={"mine": f"{HERE}:Outer.Inner"})
    register("mine", Mine)
    assert PROPOSERS.paths["mine"] == f"{HERE}:Mine"


def test_what_a_third_party_needs_is_at_the_top():
    assert {"BestFirst", "Candidates", "Growth", "best_candidates", "log_softmax_at", "register"} <= set(
        vllm_adaptive_tree.__all__
    )
    assert all(getattr(vllm_adaptive_tree, name) for name in vllm_adaptive_tree.__all__)
