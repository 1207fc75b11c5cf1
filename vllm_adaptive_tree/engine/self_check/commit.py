"""Check C: after a commit the cache equals, byte for byte, one whose accepted K/V was moved slot by slot."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vllm_adaptive_tree.engine.cpu_cache import gather_context
from vllm_adaptive_tree.engine.patches import swapped
from vllm_adaptive_tree.engine.self_check.verdict import Finding
from vllm_adaptive_tree.engine.targets.latents import is_latent
from vllm_adaptive_tree.engine.v2.sampler import TreeSampler
from vllm_adaptive_tree.engine.v2.trial import Trial


class Commit:
    """Commits of a trial, compared with the expected ones."""

    def __init__(self, trial: Trial):
        self.trial = trial
        self.moved = self.wrong = 0
        """Tokens whose K/V had to move; slots of a layer with wrong bytes."""

    def finding(self) -> Finding:
        """Result of the check. Chains move nothing."""
        shown = self.moved > 0 or self.trial.runner.pair.chains
        return Finding("commit", shown and self.wrong == 0, {"moved": self.moved, "wrong slots": self.wrong})

    def compare(self, before: dict[str, Tensor], roots: list[int], nodes: Tensor) -> None:
        """Compare a commit. `before`: the cache; `roots`: positions; `nodes` [R, L]: accepted."""
        runner, trial = self.trial.runner, self.trial
        for group, specification in enumerate(runner.kv_cache_config.kv_cache_groups):
            size = specification.kv_cache_spec.block_size
            source, target = list[int](), list[int]()
            for name, root, path in zip(trial.requests, roots, nodes.tolist(), strict=True):
                slots = [(block - trial.lowest) * size + i for block in trial.held[name][group] for i in range(size)]
                for level, node in enumerate(path):
                    if node >= 0 and node != level:
                        source.append(slots[root + 1 + node])
                        target.append(slots[root + 1 + level])
            for name in before.keys() & set(specification.layer_names):
                expected = before[name].clone()
                expected[target] = before[name][source]
                self.wrong += int((expected != self._bytes(name, size)).any(1).sum())
            self.moved = max(self.moved, len(source))

    def read(self) -> dict[str, Tensor]:
        """Bytes of each layer of the target, [slots of the trial's blocks, bytes], copied."""
        runner, cache_bytes = self.trial.runner, {}
        for group in runner.kv_cache_config.kv_cache_groups:
            for name in runner.attention.layers.keys() & group.layer_names:
                cache_bytes[name] = self._bytes(name, group.kv_cache_spec.block_size)
        return cache_bytes

    def _bytes(self, name: str, block_size: int) -> Tensor:
        runner, lowest = self.trial.runner, self.trial.lowest
        layer = runner.compilation_config.static_forward_context[name]
        cache = layer.kv_cache
        if is_latent(layer):
            rows = cache[lowest:].flatten(0, 1)
        elif not hasattr(layer.impl, "split"):  # packed for vLLM's CPU kernel
            blocks = torch.arange(lowest, len(cache))[None]
            rows = torch.cat(gather_context(cache, blocks, layer.isa), 3)[0].transpose(0, 1)
        else:  # [blocks, Hkv, block_size, 2 * D]
            rows = cache[lowest:].transpose(1, 2).flatten(0, 1)
        return rows.flatten(1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


@contextmanager
def watched(trial: Trial) -> Iterator[Commit]:
    """Compare every commit inside: between the forward and the draft nothing else writes to the cache."""
    commit, runner = Commit(trial), trial.runner
    accepts, sample = TreeSampler.__call__, runner.sample
    accepted: list[tuple[list[int], Tensor]] = []

    def accept(sampler: TreeSampler, *args: Any, **kwargs: Any) -> Any:
        output = accepts(sampler, *args, **kwargs)
        step = sampler.step
        assert step.verification is not None
        assert step.accepted is not None
        accepted.append((step.verification.root.tolist(), step.accepted.nodes.clone()))
        return output

    def watched_sample(*args: Any) -> Any:
        before = {} if runner.pair.chains else commit.read()
        output = sample(*args)
        for roots, nodes in accepted:
            commit.compare(before, roots, nodes)
        accepted.clear()
        return output

    runner.sample = watched_sample
    try:
        with swapped(TreeSampler, "__call__", accept):
            yield commit
    finally:
        del runner.sample
