"""The measured costs of target and draft forwards."""

from dataclasses import dataclass
from typing import Any

from vllm_adaptive_tree.budget.curve import Curve
from vllm_adaptive_tree.budget.reading import member, number


@dataclass(frozen=True)
class Costs:
    verify: Curve
    """Seconds of a verification by rows, with empty contexts."""
    draft: Curve | None = None
    """Seconds of a draft level by rows."""
    context: float = 0.0
    """Additional seconds of a verification per token of its requests' contexts."""

    def to_json(self) -> dict[str, Any]:
        draft = None if self.draft is None else self.draft.to_json()
        return {"verify": self.verify.to_json(), "draft": draft, "context": self.context}

    @classmethod
    def from_json(cls, data: Any) -> "Costs":
        """Raises ValueError for anything but the output of `to_json`."""
        draft = member(data, "draft")
        verify = Curve.from_json(member(data, "verify"))
        return cls(verify, None if draft is None else Curve.from_json(draft), number(member(data, "context")))

    def __str__(self) -> str:
        parts = [f"of a verification by rows: {_shown(self.verify)}"]
        if self.draft is not None:
            parts.append(f"of a draft level by rows: {_shown(self.draft)}")
        parts.append(f"for 1000 tokens of context: {1e6 * self.context:.2f}")
        return "ms " + "; ".join(parts)


def _shown(curve: Curve) -> str:
    points = zip(curve.rows.tolist(), curve.seconds.tolist(), strict=True)
    return ", ".join(f"{rows:.0f}: {1000 * seconds:.2f}" for rows, seconds in points)
