"""Ports of a decoding step: what it asks of the engine it runs in.

R is the number of requests of the batch, N the largest number of nodes of a tree, V the vocabulary. Tensors are on the
target's device. On a GPU an adapter never waits for it: `proceed` returns True without a look, and shapes follow from
host numbers alone.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted, Draw
from vllm_adaptive_tree.drafters import Continuations
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.proposers import Proposal
from vllm_adaptive_tree.rng import RandomSource
from vllm_adaptive_tree.trees import TreeBatch

Choose = Callable[[Tensor, Callable[[], Tensor]], Tensor]
"""(p [R, V], function that returns the engine's own sample from p) -> tokens [R]."""


class Verification(Protocol):
    """Trees of one step, and where their rows are."""

    @property
    def tree(self) -> TreeBatch:
        """Trees, [R, N]; empty for requests without one."""

    @property
    def levels(self) -> int:
        """Upper bound of the depth of these trees, on the host."""

    @property
    def max_children(self) -> int:
        """Upper bound of the children of a node, on the host."""

    @property
    def initial(self) -> Tensor:
        """[R]: leading nodes of each tree that the target has sampled itself (`init_width`)."""

    @property
    def chosen(self) -> Tensor | None:
        """[R, N] bool: nodes that a look-up has chosen, among drawn ones; None: there is none."""

    def draft_probs(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """q [R, V] that the children of `node` [R] (-1: the root) were drawn from, and the number of children planned
        [R]; zeros for nodes that the draft has not read."""


V = TypeVar("V", bound=Verification)
V_contra = TypeVar("V_contra", bound=Verification, contravariant=True)


class Requests(Protocol):
    """Requests of a verification, by row."""

    @property
    def all_from_target(self) -> bool:
        """True if every request walks with the target's own draws; on the host."""

    @property
    def greedy(self) -> Tensor:
        """[R] bool: requests of temperature 0."""

    @property
    def from_target(self) -> Tensor | None:
        """[R] bool: requests that walk with the target's own draws, whatever the rule; None: there is none."""

    def rng(self, purpose: int) -> RandomSource:
        """Random numbers of a purpose, keyed by each request's seed and the position of its root."""


class Target(Protocol[V_contra]):
    """Target's distributions and draws at the nodes of a verification, through the engine's own sampler: after
    temperature, penalties, biases, top-k, top-p and whatever else a request asks for.

    `node` [R] is -1 at the root; rows that are not `active` [R] are ignored. A draw returns tokens [R], and [R] bool:
    False ends the walk after that token.
    """

    @property
    def rules(self) -> Mapping[Draw, Draw]:
        """Kernels that replace rules token for token."""

    def draw(self, node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Take the engine's own sample."""

    def draw_by(self, choose: Choose, node: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Take the token that `choose` takes."""

    def probs(self, node: Tensor, active: Tensor) -> Tensor:
        """p [R, V] of the next token."""

    def proceed(self, active: Tensor) -> bool:
        """Return whether a loop over nodes goes on; False once no request is active, if that is known for free."""

    def walk_at_once(self, verification: V_contra) -> Accepted | None:
        """Walk all trees with the engine's own samples, if they are known before the walk."""

    def rule_at_once(
        self, pair: Pair, verification: V_contra, rng: RandomSource, active: Tensor | None
    ) -> Accepted | None:
        """Accept by the rule of the pair in one kernel, if there is one; `active` [R]: None for all requests."""

    def emit(self, verification: V_contra, paths: Accepted, from_target: Tensor | None) -> Accepted:
        """Emit `paths`; requests `from_target` [R] walk with the engine's own samples in their place."""


class Engine(Protocol[V]):
    """Model runner of an engine, entered once per step."""

    def lay_out(self, batch: Any) -> V | None:
        """Lay out the drafted trees that the scheduler has kept, and write the positions of their rows."""

    def agreed(self, verification: V, accepted: Accepted) -> Accepted:
        """Return rank 0's paths on every rank, or check that they are equal."""

    def commit(self, verification: V, nodes: Tensor) -> None:
        """Move the K/V of the accepted `nodes` [R, L] (-1 pads) in every layer of the target."""

    def observe(self, verification: V, accepted: Accepted) -> None:
        """Hand the step to the budget, the metrics and the records."""


class Draft(Protocol):
    """Drafting of one batch."""

    nodes: int
    """N: nodes of each tree."""

    @property
    def limits(self) -> Tensor | None:
        """[R]: most nodes of each tree, as its request asks; None: no request asks for fewer."""

    def begin(self) -> int:
        """Return the number of levels that pay, by the budget; 0: the draft rests."""

    def read(self, accepted: Accepted | None, levels: int) -> bool:
        """Read the accepted tokens, and those of steps in which the draft rested; with `levels` 0 none. Returns False
        if no request needs a tree."""

    def grow(self, levels: int) -> Proposal:
        """Grow a tree for each root, of at most so many levels: `proposers.draft_tree`."""

    def empty(self) -> Proposal:
        """Trees without a node."""

    def continuations(self, levels: int) -> Continuations | None:
        """Continuations of the text to be merged into the trees: of a look-up beside the draft, or while it rests; None
        if there is no look-up, or nothing for trees of its own."""

    def merge(self, proposal: Proposal, continuations: Continuations) -> Proposal:
        """The best nodes of the trees and of the continuations together: `proposers.merging.merge`."""

    def keep(self, proposal: Proposal, merged: Continuations | None) -> None:
        """Keep the trees for the next verification: all, or what the budget affords."""

    def end(self) -> None:
        """End the step: the budget learns its costs."""
