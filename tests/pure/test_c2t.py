"""C2T (arXiv 2502.13652) against its Algorithm 1 in plain Python; its classifier and the file that holds one."""

import math
from itertools import pairwise, product

import pytest
import torch
from safetensors.torch import save_file

from tests.oracles.growth import Fixed, Recorder, as_the_engine, grow, log_probs_of, models_of
from vllm_adaptive_tree.budget import FREE
from vllm_adaptive_tree.budget.acceptance_model import Calibration
from vllm_adaptive_tree.budget.allocation import allocate
from vllm_adaptive_tree.gates.training import alive_units
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.proposers.c2t import C2T, C2TOptions, features
from vllm_adaptive_tree.proposers.gate import Gate, entropy
from vllm_adaptive_tree.testing.models import Path, ToyLM
from vllm_adaptive_tree.testing.well_formed import paths_of

COUNT = 12
SEEDS = [1, 2, 3]
OPTIONS = {"beta": 0.5, "top_k": 3, "entropy_top": 1000, "max_depth": 4, "second_pruning": True, "mode": "tree"}


def proposer_of(gate: torch.nn.Module, **options) -> C2T:
    return C2T(gate, C2TOptions(**{**OPTIONS, **options}))


def random_gate(seed: int) -> Gate:
    """Confidences all over the place, so that the prunings matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        gate = Gate(3, 48)
        for weight in gate.parameters():
            weight.data = torch.randn_like(weight) * (0.4 if weight.dim() == 2 else 0.2)
    return gate.requires_grad_(requires_grad=False)


def entropy_by_hand(law: list[float], top: int) -> float:
    return -math.fsum(q * math.log(q) for q in sorted(law, reverse=True)[:top] if q > 0)


def algorithm_1(model: ToyLM, gate: torch.nn.Module, temperature: float, **options) -> dict[Path, float]:
    """The paper's tree: every node with its confidence."""
    options = {**OPTIONS, **options}
    k = 1 if options["mode"] == "chain" else options["top_k"]
    law = log_probs_of(model, temperature).exp().tolist()
    level: dict[Path, float] = {(): 1.0}
    tree: dict[Path, float] = {}
    for d in range(options["max_depth"]):
        candidates: dict[Path, float] = {}
        for path in level:
            q = law[model.history(path)]
            h = entropy_by_hand(q, options["entropy_top"])
            for token in sorted(range(len(q)), key=lambda token: -q[token])[:k]:
                p = math.prod(law[model.history(path[:i])][x] for i, x in enumerate((*path, token)) if i < len(path))
                p *= q[token]
                candidates[*path, token] = gate(torch.tensor([p, h, d], dtype=torch.float64)).item()
        survivors = {path: c for path, c in candidates.items() if c >= options["beta"]}
        if options["second_pruning"]:
            survivors = dict(sorted(survivors.items(), key=lambda node: -node[1])[:k])
        tree |= survivors
        level = survivors
    return tree


def trees_of(gate: torch.nn.Module, *, vocabulary: int = 4, nodes: int = 400, temperature: float = 1.0, **options):
    models = models_of(vocabulary, 4, COUNT)
    engine = {"agree": as_the_engine} if options.pop("engine", False) else {}
    return models, grow(proposer_of(gate, **options), models, nodes=nodes, temperature=temperature, **engine)


@pytest.mark.parametrize("options", [{}, {"engine": True}])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("beta", [0.3, 0.5, 0.6])
@pytest.mark.parametrize(("second_pruning", "mode"), [*product((True, False), ("tree", "chain"))])
def test_the_tree_of_algorithm_1(second_pruning, mode, beta, seed, options):
    gate, how = random_gate(seed), {"beta": beta, "second_pruning": second_pruning, "mode": mode, "entropy_top": 3}
    models, proposal = trees_of(gate, temperature=0.8, **how, **options)
    for model, tree in zip(models, paths_of(proposal), strict=True):
        paper = algorithm_1(model, gate, 0.8, **how)
        assert len(tree) == len(paper)
        assert set(tree) == set(paper)
        assert all(confidence >= beta for confidence in paper.values())


def test_the_settings_above_lead_to_trees_of_many_sizes():
    """Otherwise the comparison proves little."""
    sizes = {
        len(tree)
        for seed in SEEDS
        for beta in (0.3, 0.5, 0.6)
        for tree in paths_of(trees_of(random_gate(seed), beta=beta, second_pruning=False)[1])
    }
    assert len(sizes) > 10
    assert {0, 3 + 9 + 27 + 81} <= sizes


def test_a_gate_that_reads_logarithms():
    gate, model = Fixed.always(1.0), ToyLM.random(5, 2, seed=3)
    options = {"max_depth": 2, "top_k": 2, "second_pruning": False}
    for kind in ("paper", "log"):
        gate.features = kind
        grow(proposer_of(gate, **options), [model], nodes=50)
    paper, log = torch.cat(gate.seen[:2], 1), torch.cat(gate.seen[2:], 1)
    used = paper[..., 0] > 0
    assert torch.allclose(paper[used][:, 0].log(), log[used][:, 0])
    assert torch.equal(paper[used][:, 1:], log[used][:, 1:])
    never = torch.tensor([-torch.inf, -1e4, -1.0])
    assert features(never, never, never, "log")[:, 0].tolist() == [-60.0, -60.0, -1.0]
    assert features(never, never, never, "paper")[:, 0].tolist() == pytest.approx([0.0, 0.0, math.exp(-1)])


def test_features():
    """Path probability, entropy of the parent's law over its M best tokens (not renormalised), depth from 0."""
    gate = Fixed.always(1.0)
    model = ToyLM.random(5, 2, seed=3)
    grow(proposer_of(gate, entropy_top=2, max_depth=2, top_k=2, second_pruning=False), [model], nodes=50)
    law = model.probs.tolist()
    first, second = gate.seen
    best = [sorted(range(5), key=lambda token: -row[token]) for row in law]
    h_root = entropy_by_hand(law[0], 2)
    assert first[0].tolist() == [pytest.approx([law[0][token], h_root, 0]) for token in best[0][:2]]
    expected = []
    for parent in best[0][:2]:
        below = model.history((parent,))
        h = entropy_by_hand(law[below], 2)
        expected += [pytest.approx([law[0][parent] * law[below][token], h, 1]) for token in best[below][:2]]
    assert second[0, :4].tolist() == expected
    assert h_root < entropy_by_hand(law[0], 5)


@pytest.mark.parametrize("top", [1, 3, 4, 1000])
def test_entropy_is_that_of_the_top_tokens(top):
    law = torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=torch.float64)
    assert entropy(law.log(), top).item() == pytest.approx(entropy_by_hand(law.tolist(), top), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_a_smaller_beta_only_adds_nodes(seed):
    gate = random_gate(seed)
    betas = [0.8, 0.6, 0.5, 0.4, 0.2, 0.0]
    forests = [paths_of(trees_of(gate, beta=beta, second_pruning=False)[1]) for beta in betas]
    for fewer, more in pairwise(forests):
        assert all(set(a) <= set(b) for a, b in zip(fewer, more, strict=True))
    sizes = [sum(map(len, forest)) for forest in forests]
    assert len(set(sizes)) > 2
    assert sizes[-1] == COUNT * (3 + 9 + 27 + 81)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_second_pruning_leaves_k_nodes_a_level(top_k):
    wide = []
    for seed in range(3):
        _, proposal = trees_of(random_gate(seed), top_k=top_k, beta=0.3)
        wide += [sum(len(path) == depth for path in tree) for tree in paths_of(proposal) for depth in range(1, 5)]
    assert max(wide) == top_k


@pytest.mark.parametrize("second_pruning", [True, False])
def test_chain_mode_exits_early(second_pruning):
    depths = set()
    for seed in range(3):
        models, proposal = trees_of(random_gate(seed), mode="chain", beta=0.5, second_pruning=second_pruning)
        for model, tree in zip(models, paths_of(proposal), strict=True):
            assert all(path == tree[-1][: len(path)] for path in tree)
            assert all(path[-1] == model.probs[model.history(path[:-1])].argmax() for path in tree)
            depths.add(len(tree))
    assert {0, 4} < depths


def test_no_survivor_in_the_first_layer_leaves_no_tree():
    models = models_of(4, 4, 3)
    recorder = Recorder(models)
    proposal = grow(proposer_of(Fixed.always(0.4)), models, nodes=20, drafter=recorder, agree=as_the_engine)
    assert paths_of(proposal) == [[], [], []]
    assert recorder.widths == []
    assert paths_of(grow(proposer_of(Fixed.always(0.4)), models, nodes=20)) == [[], [], []]


def test_a_confidence_of_just_beta_is_enough():
    models = models_of(4, 4, 3)
    trees = paths_of(grow(proposer_of(Fixed.always(0.5), beta=0.5, max_depth=2), models, nodes=20))
    assert [len(tree) for tree in trees] == [6] * 3


def least_confidence(paper: dict[Path, float]) -> dict[Path, float]:
    """Of every node of `algorithm_1`, the least confidence on its path."""
    least: dict[Path, float] = {}
    for path, confidence in paper.items():
        least[path] = min(confidence, least.get(path[:-1], 1.0))
    return least


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("nodes", [3, 7, 20])
def test_where_the_budget_is_short_the_most_confident_nodes_stay(nodes, engine):
    """By the least confidence on the path, so that they form a tree; of equals the more probable path."""
    otherwise = 0  # trees that the path probability alone would have cut to other nodes
    for seed in SEEDS:
        gate = random_gate(seed)
        models, proposal = trees_of(gate, nodes=nodes, beta=0.3, second_pruning=False, engine=engine)
        for model, tree, weight in zip(models, paths_of(proposal), proposal.tree.log_weight.tolist(), strict=True):
            least = least_confidence(algorithm_1(model, gate, 1.0, beta=0.3, second_pruning=False))
            best = sorted(least, key=lambda path: (-least[path], -model.probability(path)))
            assert set(tree) == set(best[:nodes])
            assert weight[: len(tree)] == pytest.approx([math.log(least[path]) for path in tree], abs=1e-4)
            assert weight == sorted(weight, reverse=True), "any cut keeps the most confident"
            otherwise += set(tree) != set(sorted(least, key=lambda path: -model.probability(path))[:nodes])
    assert otherwise >= 5


def test_of_equals_the_most_probable_paths_stay():
    gate = Fixed.always(1.0)
    models, proposal = trees_of(gate, nodes=7, second_pruning=False)
    for model, tree in zip(models, paths_of(proposal), strict=True):
        every = algorithm_1(model, gate, 1.0, second_pruning=False)
        assert set(tree) == set(sorted(every, key=lambda path: -model.probability(path))[:7])


def test_only_what_could_still_enter_the_budget_is_drafted():
    gate, models = random_gate(1), models_of(4, 4, COUNT)
    recorder = Recorder(models)
    trees = paths_of(
        grow(proposer_of(gate, beta=0.3, second_pruning=False), models, nodes=7, drafter=recorder, agree=as_the_engine)
    )
    for model, tree, *levels in zip(models, trees, *(level.tolist() for level in recorder.histories[1:]), strict=True):
        least = least_confidence(algorithm_1(model, gate, 1.0, beta=0.3, second_pruning=False))
        worst = min((least[path] for path in tree), default=0.0) if len(tree) == 7 else 0.0
        read = {history for level in levels for history in level if history >= 0}
        assert read <= {model.history(path) for path, value in least.items() if value >= worst - 1e-6}


def test_a_value_is_a_score_that_a_budget_can_calibrate():
    _, proposal = trees_of(random_gate(2), nodes=30, beta=0.0, second_pruning=False)
    tree, calibration = proposal.tree, Calibration()
    value = tree.log_weight.exp()
    assert ((value > 0) == tree.valid).all()
    assert value.max() <= 1
    parents = torch.cat([torch.ones_like(value[:, :1]), value], 1).gather(1, tree.parent + 1)
    assert (value <= parents).all()
    order = value.flatten().argsort()
    chance = calibration(value, torch.ones_like(tree.depth)).flatten()[order]
    assert (chance.diff() >= -1e-12).all()
    kept = torch.from_numpy(allocate(value, verify=FREE.verify, price=0.0, most=40))
    assert kept.sum() == 40
    assert value[torch.arange(30) < kept[:, None]].min() >= value[torch.arange(30) >= kept[:, None]].max() - 1e-12


def test_the_second_pruning_goes_by_a_node_s_own_confidence():
    """Not by the least one on its path, which is what a budget goes by."""
    for seed in SEEDS:
        gate = random_gate(seed)
        models, proposal = trees_of(gate, beta=0.3)
        for model, tree in zip(models, paths_of(proposal), strict=True):
            assert set(tree) == set(algorithm_1(model, gate, 1.0, beta=0.3))


def test_read_and_drawn():
    def check(proposal: Proposal) -> None:
        assert (proposal.num_planned[:, 0] == 3).all()
        assert torch.equal(proposal.num_planned[:, 1:], torch.where(proposal.read > 0, 3, 0))
        for tree, read in zip(paths_of(proposal), proposal.read.tolist(), strict=True):
            inner = {path[:-1] for path in tree}
            assert all(read[node] > 0 for node, path in enumerate(tree) if path in inner)

    for engine in (False, True):
        check(trees_of(random_gate(0), beta=0.4, engine=engine)[1])


def test_a_request_in_a_batch_is_grown_as_if_alone():
    gate = random_gate(2)
    models, together = trees_of(gate, beta=0.5, nodes=12, engine=True)
    alone = [paths_of(grow(proposer_of(gate), [model], nodes=12, agree=as_the_engine))[0] for model in models]
    assert paths_of(together) == alone
    assert len({len(tree) for tree in alone}) > 2


# -- the classifier and its file


def test_the_paper_s_classifier_has_241_parameters():
    assert sum(weight.numel() for weight in Gate(3, 48).parameters()) == 241


def test_a_saved_gate_is_read_back(tmp_path):
    gate, features = Gate(3, 48), torch.rand(2, 5, 3, dtype=torch.float64)
    save_file(gate.state_dict(), tmp_path / "gate.safetensors")
    read = Gate.load(tmp_path / "gate.safetensors", inputs=3)
    assert torch.equal(read(features), gate(features))
    assert read(features).shape == (2, 5)
    assert not any(weight.requires_grad for weight in read.parameters())
    first, _, last = gate.layers
    hidden = (first.weight @ features[0, 0].float() + first.bias).clamp(min=0)
    assert read(features)[0, 0].item() == pytest.approx(torch.sigmoid(last.weight @ hidden + last.bias).item())


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read '.*none\.safetensors'.*FileNotFoundError.*train"):
        Gate.load(tmp_path / "none.safetensors", inputs=3)


def test_a_truncated_file(tmp_path):
    file = tmp_path / "gate.safetensors"
    save_file(Gate(3, 48).state_dict(), file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cannot read '.*gate\.safetensors'.*train"):
        Gate.load(file, inputs=3)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"cannot read '.*gate\.safetensors'"):
        Gate.load(file, inputs=3)
    file.write_text("no weights")
    with pytest.raises(ValueError, match=r"cannot read '.*gate\.safetensors'"):
        Gate.load(file, inputs=3)


@pytest.mark.parametrize(
    "weights",
    [
        Gate(11, 44).state_dict(),  # another method's
        {name: weight for name, weight in Gate(3, 48).state_dict().items() if name != "layers.2.bias"},
        {**Gate(3, 48).state_dict(), "layers.4.weight": torch.zeros(1)},
        {**Gate(3, 48).state_dict(), "layers.2.weight": torch.zeros(1, 47)},
        {**Gate(3, 48).state_dict(), "layers.0.weight": torch.tensor(1.0)},
        {**Gate(3, 48).state_dict(), "layers.0.weight": torch.zeros(0, 3)},
        {"weight": torch.zeros(3)},
        {},
    ],
)
def test_another_model_s_file(weights, tmp_path):
    save_file(weights, tmp_path / "gate.safetensors")
    with pytest.raises(ValueError, match=r"gate\.safetensors' does not hold a gate of 3 features.*3-h-..-1.*train"):
        Gate.load(tmp_path / "gate.safetensors", inputs=3)


def recorded_like() -> torch.Tensor:
    """Log path probability, entropy and depth of 20,000 nodes as drafted trees have them."""
    random = torch.Generator().manual_seed(0)
    depth = torch.randint(0, 10, (20000,), generator=random).double()
    path = torch.rand(20000, generator=random).double().log() * (1 + depth)  # one factor a level
    entropy = 6 * torch.rand(20000, generator=random).double() ** 2
    return torch.stack([path, entropy, depth])


def test_the_shipped_gate_has_learnt_something():
    """Its units are alive, it tells nodes apart, and a more probable path is never less worth verifying."""
    gate = Gate.load(C2TOptions().shipped(), inputs=3)
    path, entropy, depth = recorded_like()
    inputs = features(path, entropy, depth, gate.features)
    assert [units >= all_ / 2 for units, all_ in alive_units(gate, inputs)] == [True]
    confidence = gate(inputs)
    assert confidence.min() < 0.01
    assert confidence.max() > 0.9
    likelier = gate(features((path + 0.7).clamp(max=0.0), entropy, depth, gate.features))
    assert (likelier - confidence).min() > -0.02
    hopeless = gate(features(torch.full_like(path, math.log(1e-6)), entropy, depth, gate.features))
    assert hopeless.max() < 0.05
