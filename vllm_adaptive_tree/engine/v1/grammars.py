"""The grammars that a draft follows: the scheduler's, or copies where the scheduler is in another process."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_adaptive_tree.engine.common.grammar import GrammarWalk
from vllm_adaptive_tree.engine.common.ranks import is_rank_0
from vllm_adaptive_tree.engine.common.structured_outputs import TreeGrammarOutput, advance, walk_of

logger = init_logger(f"vllm.{__name__}")


class Grammars:
    """Of a worker's requests. Copies are rank 0's alone, whose trees are those of every rank: it compiles what a
    request brings, beside its steps, and moves the copy by what the request puts out. Until a copy is there, and while
    a request reasons, its draft follows no grammar."""

    def __init__(self, vllm_config: Any):
        self.vllm_config = vllm_config
        self.manager: StructuredOutputManager | None = None
        self.thread = ThreadPoolExecutor(1, "grammars")
        self.copies: dict[str, Future[GrammarCopy]] = {}

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.copies.pop(name, None)

    def of(self, output: GrammarOutput | None, requests: Mapping[str, Any]) -> Mapping[str, GrammarWalk]:
        """The grammars of a step's requests, where the step's masks have them.

        Args:
            output: the masks.
            requests: the worker's, by name, before the step's tokens are among what they have put out.
        """
        if not isinstance(output, TreeGrammarOutput):
            return {}
        if output.walks is not None:
            return output.walks
        if not is_rank_0():
            return {}
        words, found = output.grammar_bitmask.shape[1], dict[str, GrammarWalk]()
        for name, first in output.first.items():
            if name not in self.copies:
                self.copies[name] = self.thread.submit(self._copy, name, requests[name].sampling_params)
            copy = self.copies[name]
            if copy.done() and copy.exception() is None:
                walk = copy.result().walk(requests[name].output_token_ids[first:], words)
                if walk is not None:
                    found[name] = walk
        return found

    def _copy(self, name: str, sampling_params: Any) -> "GrammarCopy":
        """In the thread, because the first one loads the tokenizer."""
        try:
            self.manager = self.manager or StructuredOutputManager(self.vllm_config)
            return GrammarCopy(self.manager, name, sampling_params)
        except Exception as error:
            logger.warning(
                "The draft of request %s does not follow its grammar, which could not be copied: %s", name, error
            )
            raise


class GrammarCopy:
    def __init__(self, manager: StructuredOutputManager, name: str, sampling_params: Any):
        self.manager = manager
        self.own = StructuredOutputRequest(sampling_params.structured_outputs, reasoning_ended=True)
        self.request = SimpleNamespace(
            request_id=name,
            sampling_params=sampling_params,
            use_structured_output=True,
            structured_output_request=self.own,
        )
        self.read = 0
        """Tokens that it has read."""
        self.follows = True
        manager.grammar_init(self.request)

    def walk(self, said: list[int], words: int) -> GrammarWalk | None:
        """The grammar after `said`, all that the request has put out under it; None while it compiles, and from the
        first token on that it rejects. `words`: of a mask."""
        if not self.follows or not self.own.is_grammar_ready:
            return None
        new, self.read = said[self.read :], len(said)
        self.follows = not isinstance(self.own.grammar, Exception) and advance(self.manager, self.request, new)
        return walk_of(self.manager, self.request, words) if self.follows else None
