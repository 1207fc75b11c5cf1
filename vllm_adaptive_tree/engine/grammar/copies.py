"""Grammars that a draft follows: the scheduler's, or copies where the scheduler is in another process."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_adaptive_tree.engine.common.ranks import is_rank_0
from vllm_adaptive_tree.engine.grammar.structured_outputs import TreeGrammarOutput, advance, walk_of
from vllm_adaptive_tree.engine.grammar.walk import GrammarWalk

logger = init_logger(f"vllm.{__name__}")


class Grammars:
    """Grammars of a worker's requests. Only rank 0, whose trees all ranks use, has copies: it compiles a request's
    grammar in a thread, and advances the copy by the request's output. Until a copy is there, and while a request
    reasons, its draft follows no grammar."""

    def __init__(self, vllm_config: Any):
        self.vllm_config = vllm_config
        self.manager: StructuredOutputManager | None = None
        self.thread = ThreadPoolExecutor(1, "grammars")
        self.copies: dict[str, Future[GrammarCopy]] = {}
        self.rewritten: set[str] = set()
        """Sessions of streaming input after their first turn: their grammar has read tokens that are not output now."""

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.copies.pop(name, None)
            self.rewritten.discard(name)

    def leave(self, names: Iterable[str]) -> None:
        """Stop following copies for these requests."""
        self.forget(names)
        self.rewritten |= set(names)

    def of(self, output: GrammarOutput | None, requests: Mapping[str, Any]) -> Mapping[str, GrammarWalk]:
        """Grammars of a step's requests, where the step's masks have them.

        Args:
            output: the masks.
            requests: the worker's, by name, before the step's tokens are added to their output.
        """
        if not isinstance(output, TreeGrammarOutput):
            return {}
        if output.walks is not None:
            return output.walks
        if not is_rank_0():
            return {}
        words, walks = output.grammar_bitmask.shape[1], dict[str, GrammarWalk]()
        for name, first in output.first.items():
            if name in self.rewritten:
                continue
            if name not in self.copies:
                self.copies[name] = self.thread.submit(self._copy, name, requests[name].sampling_params)
            copy = self.copies[name]
            if copy.done() and copy.exception() is None:
                walk = copy.result().walk(requests[name].output_token_ids[first:], words)
                if walk is not None:
                    walks[name] = walk
        return walks

    def _copy(self, name: str, sampling_params: Any) -> "GrammarCopy":
        """Compile a copy; runs in the thread, because the first one loads the tokenizer."""
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
        self.structured = StructuredOutputRequest(sampling_params.structured_outputs, reasoning_ended=True)
        self.request = SimpleNamespace(
            request_id=name,
            sampling_params=sampling_params,
            use_structured_output=True,
            structured_output_request=self.structured,
        )
        self.read = 0
        """Number of tokens that it has read."""
        self.follows = True
        manager.grammar_init(self.request)

    def walk(self, said: list[int], words: int) -> GrammarWalk | None:
        """Grammar after `said`, the request's whole output under it; None while it compiles, after a token that it
        rejects, and after a fault. `words`: of a mask."""
        if not self.follows or not self.structured.is_grammar_ready:
            return None
        new, self.read = said[self.read :], len(said)
        try:
            self.follows = not isinstance(self.structured.grammar, Exception) and advance(
                self.manager, self.request, new
            )
        except Exception as error:
            self._leave(error)
        return walk_of(self.manager, self.request, words, failed=self._leave) if self.follows else None

    def _leave(self, error: Exception) -> Any:
        name, self.follows = self.request.request_id, False
        logger.warning("The draft of request %s no longer follows its grammar, which has failed: %s", name, error)
        return self.structured.grammar
