"""Reports of the acceptance alarm: a line of the log, and a file in vLLM's cache folder for `doctor`."""

import hashlib
import json
import time
from pathlib import Path
from threading import Thread
from typing import Any

from vllm import envs
from vllm.logger import init_logger

from vllm_adaptive_tree.config import TreeOptions
from vllm_adaptive_tree.engine.drafts.causes import causes
from vllm_adaptive_tree.engine.drafts.registry import kind_in
from vllm_adaptive_tree.engine.metrics.acceptance_alarm import AcceptanceAlarm, Window
from vllm_adaptive_tree.engine.names import CONFIG_KEY
from vllm_adaptive_tree.files import atomic_write

logger = init_logger(f"vllm.{__name__}")

FIELDS = "target", "draft", "method", "engine", "time", *Window._fields, "causes"


def folder() -> Path:
    """Folder of the records of this user's engines."""
    return Path(envs.VLLM_CACHE_ROOT) / "adaptive_tree" / "acceptance"


class AcceptanceRecord:
    """Record of one engine. A thread looks for causes, and reads and writes files."""

    def __init__(self, config: Any, options: TreeOptions):
        """`config` is vLLM's."""
        self.config, self.options = config, options
        self.thread: Thread | None = None

    def tell(self, window: Window) -> None:
        self.thread = Thread(target=self._tell, args=(window,), name="acceptance-alarm", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:  # no step fails for a line of the log
            logger.warning("What the draft's acceptance is cannot be looked into: %s", error)

    def _tell(self, window: Window) -> None:
        draft, kind = self.config.speculative_config.draft_model_config.model, kind_in(self.options)
        share = f"{window.accepted / window.steps:.1%}"
        try:
            reasons = [str(cause) for cause in causes(self.config, kind.causes)] if window.low else []
        except Exception as error:  # the checkpoint may have been removed
            reasons = [f"not known: {error}"]
        if window.low:
            logger.warning(
                "The target accepts next to nothing of draft %s (%s): a node at depth 1 in %d of %d drafted steps "
                "(%s). The output is right, and drafting is lost time. Likely causes: %s",
                draft,
                kind.title,
                window.accepted,
                window.steps,
                share,
                "; ".join(reasons),
            )
        else:
            logger.info(
                "The target accepts a node at depth 1 of draft %s in %d of %d drafted steps (%s)",
                draft,
                window.accepted,
                window.steps,
                share,
            )
        self._write({**window._asdict(), "causes": reasons})

    def _write(self, said: dict[str, Any]) -> None:
        spec, parallel = self.config.speculative_config, self.config.parallel_config
        key = {
            "target": str(self.config.model_config.model),
            "draft": str(spec.draft_model_config.model),
            "method": self.options.method,
            "engine": parallel.data_parallel_index,
        }
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        try:
            folder().mkdir(parents=True, exist_ok=True)
            text = json.dumps({**key, "time": time.strftime("%Y-%m-%d %H:%M:%S"), **said}, indent=1)
            atomic_write(folder() / f"{name}.json", (text + "\n").encode())
        except OSError as error:
            logger.warning("What the draft's acceptance is cannot be kept for `doctor`: %s", error)


def acceptance_alarm(config: Any) -> AcceptanceAlarm | None:
    """Alarm of an engine; None for look-ups, which have nothing to mend: their acceptance depends on the text."""
    options = TreeOptions.from_json(config.additional_config[CONFIG_KEY])
    return AcceptanceAlarm(AcceptanceRecord(config, options).tell) if options.text is None else None


def records() -> list[dict[str, Any]]:
    """Records of the engines of this user on this machine; files that cannot be read are left out."""
    kept = list[dict[str, Any]]()
    for file in sorted(folder().glob("*.json")):
        try:
            said = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(said, dict) and set(FIELDS) <= said.keys():
            kept.append(said)
    return kept
