"""What forwards cost, and such measurements in a file, so that an engine need not measure again."""

import json
from dataclasses import dataclass
from pathlib import Path

from vllm_adaptive_tree.budget.curve import Curve
from vllm_adaptive_tree.files import write_whole


@dataclass(frozen=True)
class Costs:
    verify: Curve
    """Seconds of a verification by rows, behind an empty context."""
    draft: Curve | None = None
    """Seconds of a draft level by rows."""
    context: float = 0.0
    """Seconds that a verification takes longer for each token of its requests' contexts."""

    @classmethod
    def read(cls, file: Path) -> "Costs":
        """Raises ValueError where the file does not hold what `write` writes."""
        try:
            data = json.loads(file.read_text())
            draft, context = data.get("draft"), float(data.get("context", 0.0))
            if not context >= 0:
                raise ValueError("context must be at least 0")
            return cls(Curve.from_json(data["verify"]), None if draft is None else Curve.from_json(draft), context)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ValueError(
                f"speculative_config['tree']['cost_profile']: {str(file)!r} is no cost profile ({error}); remove it, "
                "and costs are measured anew"
            ) from error

    def write(self, file: Path) -> None:
        draft = None if self.draft is None else self.draft.to_json()
        data = {"verify": self.verify.to_json(), "draft": draft, "context": self.context}
        write_whole(file, (json.dumps(data) + "\n").encode())

    def __str__(self) -> str:
        parts = [f"of a verification by rows: {_shown(self.verify)}"]
        if self.draft is not None:
            parts.append(f"of a draft level by rows: {_shown(self.draft)}")
        parts.append(f"for 1000 tokens of context: {1e6 * self.context:.2f}")
        return "ms " + "; ".join(parts)


def _shown(curve: Curve) -> str:
    points = zip(curve.rows.tolist(), curve.seconds.tolist(), strict=True)
    return ", ".join(f"{rows:.0f}: {1000 * seconds:.2f}" for rows, seconds in points)
