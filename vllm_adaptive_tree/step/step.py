"""The decoding step of a batch, phase by phase. Open this file first."""

from typing import Any, Generic, TypeVar

from torch import Tensor

from vllm_adaptive_tree.acceptance import Accepted
from vllm_adaptive_tree.methods import Pair
from vllm_adaptive_tree.step.accept import accept
from vllm_adaptive_tree.step.ports import Draft, Engine, Requests, Target, Verification
from vllm_adaptive_tree.step.target_init import candidates, held_back

V = TypeVar("V", bound=Verification)


class TreeStep(Generic[V]):
    """Tree speculative decoding of R requests, one step after the other.

    The engine calls the phases in this order, each from a hook of its model runner; between `verify` and `accept` it
    runs the target's one forward. What a phase needs of the engine is in `ports.py`.

        verify   the trees that the scheduler kept become rows of the flat batch
        accept   a path of each tree, and one more token
        commit   the K/V of that path moves to the slots of its positions
        draft    the accepted tokens are read, and the next trees grow
    """

    def __init__(self, pair: Pair, engine: Engine[V]):
        self.pair, self.engine = pair, engine
        self.verification: V | None = None
        """Trees of this step; None: every request decodes without one, or the engine is between two steps."""
        self.accepted: Accepted | None = None
        """Accepted paths of these trees, until the draft has read them."""
        self.initial: Tensor | None = None
        """[R, W] first layers of the next trees, -1 pads, if the target samples them itself."""

    def verify(self, batch: Any) -> V | None:
        """Lay out the trees of a batch: root and nodes are rows, parents before children, each node at position root +
        depth. Each row attends to the context and to its ancestors alone, so that one forward of the target gives its
        distribution after every node.
        """
        self.verification, self.accepted, self.initial = self.engine.lay_out(batch), None, None
        return self.verification

    def accept(self, target: Target[V], requests: Requests, *, allowed: V | None = None) -> Accepted:
        """Walk each tree from its root: sample the next token, and move to the child that has it. The last token is one
        that no child has, so a step emits one token more than it accepts nodes.

        `allowed`: the trees without the nodes that their grammars reject, if there are such nodes.
        """
        assert self.verification is not None
        accepted = accept(self.pair, target, allowed or self.verification, requests)
        self.accepted = self.engine.agreed(self.verification, accepted)
        if self.pair.init_width > 1:
            self.initial = candidates(target, self.accepted, self.pair.init_width, requests)
            self.accepted = held_back(self.accepted)
        return self.accepted

    def commit(self) -> None:
        """Move the K/V of accepted nodes from the slots of their rows to those of their positions, and let everything
        that learns from a step see it: the budget, metrics, records.
        """
        assert self.verification is not None
        assert self.accepted is not None
        self.engine.commit(self.verification, self.accepted.nodes)
        self.engine.observe(self.verification, self.accepted)

    def draft(self, draft: Draft) -> None:
        """Grow the next trees.

        The budget says how many levels pay in this batch; with none of them the draft rests, and look-ups alone may
        propose. The draft reads the accepted tokens up to the new roots, the trees grow level by level, continuations
        that a look-up finds in the text are merged into them, and what its request allows and the batch can afford is
        kept for the scheduler.
        """
        levels = draft.begin()
        if draft.read(self.accepted, levels):
            proposal = draft.grow(levels) if levels else None
            continuations = draft.continuations(levels)
            if continuations is not None:
                proposal = draft.merge(proposal or draft.empty(), continuations)
            if proposal is not None:
                draft.keep(proposal if draft.limits is None else proposal.cut(draft.limits), continuations)
        draft.end()

    def end(self) -> None:
        """Forget the trees of this step; the engine calls it after each, with or without a draft."""
        self.verification = self.accepted = self.initial = None
