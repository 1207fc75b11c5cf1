"""A record of the trees of every step, for `vllm-adaptive-tree view`; none unless `ADAPTIVE_TREE_RECORD` names a
file.

A file of JSON lines: the first describes the engine, each other one is a step. It holds the text that the requests were
given. Recording waits for the device in every step: it is for looking at trees, not for serving.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.names import setting
from vllm_adaptive_tree.trees import TreeBatch

logger = init_logger(f"vllm.{__name__}")

VARIABLE = "ADAPTIVE_TREE_RECORD"
LIMIT = 64 << 20
"""Most bytes of a file: recording ends there."""
GIVEN = 1000
"""Most tokens of the text before a request's first tree, its last ones, that are recorded."""


class StepRecord:
    """Record of the steps of one engine. If the file cannot be written, or is full, only the record is lost."""

    def __init__(self, path: Path, header: dict[str, Any], tokenizer: Any):
        """`tokenizer`: of the target; None: tokens have no text."""
        self.path, self.tokenizer, self.left, self.steps = path, tokenizer, LIMIT, 0
        self.known: set[int] = set()
        """Tokens whose text is in the file."""
        self.begun: set[str] = set()
        """Requests of which a tree is in the file."""
        self.trees: dict[str, tuple[list[int], list[int], list[float]]] = {}
        """Trees of the last step, by request: tokens, parents, values."""
        self.file: TextIO | None = None
        try:
            self.file = path.open("w")
        except OSError as error:
            logger.warning("%s=%s cannot be written, so no step is recorded: %s", VARIABLE, path, error)
        self._write({"format": 1, **header})

    @property
    def open(self) -> bool:
        """True while steps are recorded."""
        return self.file is not None

    def drafted(self, names: Sequence[str], tree: TreeBatch) -> None:
        """Note the trees [R, N] of requests with these names, before any cut."""
        if not self.open:
            return
        value = tree.log_weight.exp().nan_to_num(0.0)
        columns = (names, tree.valid.sum(1).tolist(), tree.tokens.tolist(), tree.parent.tolist(), value.tolist())
        self.trees = {
            name: (tokens[:size], parents[:size], [round(weight, 4) for weight in values[:size]])
            for name, size, tokens, parents, values in zip(*columns, strict=True)
            if size
        }

    def verified(
        self,
        names: Sequence[str],
        decodes: Iterable[bool],
        position: Iterable[int],
        count: Iterable[int],
        nodes: Tensor,
        tokens: Tensor,
        given: Callable[[int, int, int], list[int]],
    ) -> None:
        """Write the verification of the noted trees.

        Args:
            names: of the batch.
            decodes: of each request, True if only its root came before the tree.
            position: of each root.
            count: verified nodes, the first of each tree.
            nodes: [R, L] that were accepted, -1 pads.
            tokens: [R, L] that were emitted, -1 pads.
            given: tokens of a request by its row, from a first place to before a last one.
        """
        if not self.open:
            return
        trees, self.trees = self.trees, {}
        requests = []
        columns = (names, decodes, position, count, nodes.tolist(), tokens.tolist())
        for row, (name, decoded, root, size, path, emitted) in enumerate(zip(*columns, strict=True)):
            if not decoded or name not in trees:
                continue
            drafted, parents, values = trees[name]
            before = {}
            if name not in self.begun and self.tokenizer is not None:
                end = int(root) + 1
                before = {"given": self.tokenizer.decode(given(row, max(0, end - GIVEN), end))}
            self.begun.add(name)
            requests.append(
                {
                    "request": name,
                    "position": int(root),
                    "tokens": drafted,
                    "parents": parents,
                    "values": values,
                    "verified": int(size),
                    "accepted": [node for node in path if node >= 0],
                    "emitted": [token for token in emitted if token >= 0],
                    **before,
                }
            )
        if requests:
            self.steps += 1
            new = {token for request in requests for token in (*request["tokens"], *request["emitted"])} - self.known
            self.known |= new
            texts = {} if self.tokenizer is None else {token: self.tokenizer.decode([token]) for token in sorted(new)}
            self._write({"step": self.steps, "time": round(time.time(), 3), "texts": texts, "requests": requests})

    def _write(self, line: dict[str, Any]) -> None:
        if self.file is None:
            return
        text = json.dumps(line) + "\n"
        self.left -= len(text)
        try:
            if self.left >= 0:
                self.file.write(text)
                self.file.flush()
                return
            logger.warning("%s holds %d steps and is full; no more are recorded", self.path, self.steps - 1)
        except OSError as error:
            logger.warning("%s cannot be written, so no more steps are recorded: %s", self.path, error)
        file, self.file = self.file, None
        try:
            file.close()
        except OSError:  # the buffered rest is written once more
            logger.debug("%s could not be closed", self.path)


def step_record(vllm_config: Any, options: TreeOptions) -> StepRecord | None:
    """Record that the environment asks for; rank 0 of an engine makes it. Engines of data parallelism write files of
    their own: steps.jsonl, steps-1.jsonl, .."""
    name = setting(VARIABLE)
    if not name or get_tp_group().rank_in_group:
        return None
    path, engine = Path(name), vllm_config.parallel_config.data_parallel_index
    if engine:
        path = path.with_name(f"{path.stem}-{engine}{path.suffix}")
    model = vllm_config.model_config
    header = {
        "model": model.model,
        "method": options.method,
        "nodes": options.num_speculative_tokens,
        "runner": "V2" if vllm_config.use_v2_model_runner else "V1",
    }
    tokenizer = None
    if not model.skip_tokenizer_init:
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(model)
    logger.info("The trees of every step are recorded in %s, up to %d MiB", path, LIMIT >> 20)
    return StepRecord(path, header, tokenizer)
