"""Stream of a reasoning or tool parser, one token per delta as without speculation, though a step emits several.

Many of vLLM's parsers look for a marker or a call in each delta and were written for one token. Here every token of a
step goes through the parser alone, with its own text, and the results are joined: the client gets as many chunks as
before.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pydantic import PrivateAttr
from vllm.entrypoints.generate.base.protocol import DeltaMessage, DeltaToolCall
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.logger import init_logger

from vllm_adaptive_tree.engine.names import STREAMS, setting

logger = init_logger(f"vllm.{__name__}")

SWITCH = "ADAPTIVE_TREE_TOKEN_DELTAS"


def wanted() -> bool:
    """False if the user has switched this off.

    Raises:
        ValueError: the variable is neither "off" nor unset.
    """
    mode = setting(SWITCH)
    if mode not in ("", "off"):
        raise ValueError(f"{SWITCH}={mode!r}; it may be 'off' (a parser gets all tokens of a step at once), or unset")
    return not mode


def feed_by_token(parser: Any, tokenizer: Any, model_config: Any) -> None:
    """Let this parser's `parse_delta` take a step's tokens one by one."""
    defaults = getattr(model_config, STREAMS)
    parser.parse_delta = TokenDeltas(
        parser.parse_delta, tokenizer, defaults=defaults, longest=model_config.max_model_len
    )


class TokenDeltas:
    """A parser's `parse_delta` that feeds it token by token; one for each stream.

    `parse` is that function, `defaults` are the server's default sampling parameters and `longest` is the model's
    longest context.
    """

    def __init__(
        self, parse: Callable[..., DeltaMessage | None], tokenizer: Any, *, defaults: dict[str, Any], longest: int
    ) -> None:
        self._parse = parse
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._longest = longest
        self._detokenizer: Any = None
        self._off = False
        """True after a fault: the parser gets whole steps."""

    def __call__(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        texts = None if self._off else self._texts(delta_text, delta_token_ids, request, prompt_token_ids, finished)
        if texts is None:
            return self._parse(delta_text, delta_token_ids, request, prompt_token_ids, finished=finished)
        ends = [False] * (len(texts) - 1) + [finished]
        deltas = [
            self._parse(text, [token], request, prompt_token_ids, finished=end)
            for text, token, end in zip(texts, delta_token_ids, ends, strict=True)
        ]
        return joined([delta for delta in deltas if delta is not None], ordered=isinstance(request, ResponsesRequest))

    def _texts(
        self, text: str, token_ids: Sequence[int], request: Any, prompt_token_ids: list[int] | None, finished: bool
    ) -> list[str] | None:
        """Texts as of `_cut`; None after a fault, which ends no stream."""
        try:
            if self._detokenizer is None:
                self._detokenizer = self._engine_s_detokenizer(request, prompt_token_ids)
            return self._cut(text, token_ids, finished)
        except Exception:
            logger.exception("The tokens of a step cannot be told apart; the parser of this stream gets whole steps")
            self._off = True
            return None

    def _engine_s_detokenizer(self, request: Any, prompt_token_ids: list[int] | None) -> Any:
        """A second detokenizer of this request, equal to the engine's, whose text is not cut where tokens end."""
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        fields = {
            "request_id": request.request_id,
            "sampling_params": request.to_sampling_params(self._longest, self._defaults),
            "prompt_token_ids": prompt_token_ids,
            "prompt_embeds": None,
        }
        return IncrementalDetokenizer.from_new_request(self._tokenizer, SimpleNamespace(**fields))

    def _cut(self, text: str, token_ids: Sequence[int], finished: bool) -> list[str] | None:
        """Text that the engine would have sent for each token; None if there is nothing to cut, or the text differs."""
        texts = []
        for token in token_ids:
            self._detokenizer.update([token], False)
            texts.append(self._detokenizer.get_next_output_text(finished=False, delta=True))
        if len(texts) < 2:
            return None
        # At the end of a request the last token's text may be cut by a stop, or includes text held back for one.
        before = "".join(texts[:-1])
        texts[-1] = text[len(before) :] if finished else texts[-1]
        return texts if before + texts[-1] == text else None


class Runs(DeltaMessage):
    """A delta whose parts are to be sent in order; `split_delta` gives reasoning, content and calls in that order."""

    _runs: list[DeltaMessage] = PrivateAttr(default_factory=list)

    @classmethod
    def of(cls, runs: list[DeltaMessage]) -> "Runs":
        whole = cls(tool_calls=[call for run in runs for call in run.tool_calls])
        whole._runs = runs
        return whole

    def split(self, split_delta: Callable[[DeltaMessage], list[DeltaMessage]]) -> list[DeltaMessage]:
        """The parts, each as vLLM's `split_delta` splits it, without the calls that were taken out of the whole."""
        kept = {call.index for call in self.tool_calls}
        for run in self._runs:
            run.tool_calls = [call for call in run.tool_calls if call.index in kept]
        return [part for run in self._runs for part in split_delta(run)]


def joined(deltas: list[DeltaMessage], *, ordered: bool) -> DeltaMessage | None:
    """One delta for all of a step's; with `ordered` it keeps the order of parts of different kinds."""
    runs: list[DeltaMessage] = []
    for delta in deltas:
        if runs and (not ordered or _kinds(runs[-1]) == _kinds(delta)):
            _append(runs[-1], delta)
        else:
            runs.append(delta)
    return runs[0] if len(runs) == 1 else Runs.of(runs) if runs else None


def _kinds(delta: DeltaMessage) -> list[Any]:
    texts = [name for name in ("reasoning", "content") if getattr(delta, name)]
    return texts + sorted({call.index for call in delta.tool_calls})


def _append(delta: DeltaMessage, following: DeltaMessage) -> None:
    for name in following.model_fields_set - {"role", "tool_calls"}:
        old, new = getattr(delta, name, None), getattr(following, name)
        if new is not None:
            setattr(delta, name, new if old is None else old + new)
    for call in following.tool_calls:
        if not (delta.tool_calls and _continues(delta.tool_calls[-1], call)):
            delta.tool_calls = [*delta.tool_calls, call]


def _continues(call: DeltaToolCall, following: DeltaToolCall) -> bool:
    """Return whether `following` only has more arguments of `call`; if so, they are appended."""
    new = following.function
    if (
        following.index != call.index
        or following.id is not None
        or call.function is None
        or new is None
        or new.name is not None
    ):
        return False
    call.function.arguments = (call.function.arguments or "") + (new.arguments or "")
    return True
