"""States of the target that a head reads: where a checkpoint names them, and where vLLM looks for them.

vLLM has several readers of a head's configuration, and each looks at one place: Model Runner V1 and V2 for the layers,
the head's class for their number and for its norms. A checkpoint may name them at another one.
"""

import logging
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from vllm_adaptive_tree.engine.checkpoint import Checkpoint

logger = logging.getLogger(f"vllm.{__name__}")

IDS = "eagle_aux_hidden_state_layer_ids"
SECTION = "eagle_config"


class Place(NamedTuple):
    section: str | None  # of the config.json; None: its top
    key: str
    below: int = 0  # layers below the state, minus the number that the checkpoint gives

    def __str__(self) -> str:
        return self.key if self.section is None else f"{self.section}.{self.key}"


LAYERS = (
    Place(None, IDS),
    Place(SECTION, IDS),
    Place(None, "aux_hidden_state_layer_ids"),
    Place("dflash_config", "target_layer_ids", 1),
    Place(None, "target_layer_ids", 1),
    Place(None, "dspark_target_layer_ids", 1),
    Place("dflash_config", "layer_ids"),
    Place(SECTION, "layer_ids"),
)
"""Places at which checkpoints of all kinds name the layers, in the format of speculators too."""
SWITCHES = ("use_aux_hidden_state", "norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
"""Switches of an EAGLE-3 or P-EAGLE head, at its config.json's top or in `eagle_config`; EAGLE-3.1 has the norms."""


def states_of(draft: Checkpoint) -> tuple[int, ...]:
    """Number of the target's layers below each state that the head reads; empty: the checkpoint does not say.

    Raises:
        ValueError: the checkpoint contradicts itself, or gives something else than numbers of layers.
    """
    ids_by_place = dict[Place, tuple[int, ...]]()
    for place, ids in _said(draft.config, LAYERS):
        if not isinstance(ids, list | tuple) or any(type(layer) is not int for layer in ids):
            raise draft.refused(f"names no layers by {place} {ids!r} in its config.json; give a list of whole numbers")
        if ids:
            ids_by_place[place] = tuple(layer + place.below for layer in ids)
    _check_agreement(draft, ids_by_place, "reads the target's states below layers")
    return next(iter(ids_by_place.values()), ())


def switches_of(draft: Checkpoint) -> dict[str, Any]:
    """Values of those `SWITCHES` that the head has.

    Raises:
        ValueError: the checkpoint gives two values of one.
    """
    switches = dict[str, Any]()
    for key in SWITCHES:
        said = dict(_said(draft.config, (Place(SECTION, key), Place(None, key))))
        _check_agreement(draft, said, f"has {key}")
        if said:
            switches[key] = next(iter(said.values()))
    return switches


def default_states(layers: int) -> tuple[int, ...]:
    """States that vLLM takes for a head that names none, with a target of so many `layers`."""
    return 2, layers // 2, layers - 3


def check_states(draft: Checkpoint, layers: int, given: str | None = None) -> tuple[int, ...]:
    """`states_of`, or vLLM's default with a warning. `layers`: of the target; `given`: key that a head without a
    default must have.

    Raises:
        ValueError: the target has no such layers, or vLLM would feed them in another order.
    """
    named = states_of(draft)
    if not named and given is not None:
        raise draft.refused(f"does not say which layers of the target it reads; set {given} in its config.json")
    ids = named or default_states(layers)
    if any(lower >= upper for lower, upper in pairwise(ids)) or ids[0] < 0 or ids[-1] > layers:
        where = next((str(place) for place, said in _said(draft.config, LAYERS) if said), f"{IDS}, by default")
        raise draft.refused(
            f"reads the target's layers {list(ids)} ({where}), which must increase from 0 to at most {layers}, the "
            "target's number of layers; use a head trained for this target"
        )
    if not named:
        logger.warning(
            "speculative_config['model']: %r does not say which layers of the target it reads, so vLLM's guess is "
            "taken, %s of %d; if it was trained on others hardly a token will be accepted: set %s in its config.json",
            draft.model,
            list(ids),
            layers,
            IDS,
        )
    return ids


def finalize_head_config(head: Any, draft: Checkpoint, states: tuple[int, ...]) -> None:
    """Write the checkpoint's values to every place at which vLLM 0.32 or 0.33 looks.

    Args:
        head: the draft's configuration as vLLM has built it.
        states: as of `check_states`; none: the head reads the target's last state.
    """
    said: dict[str, Any] = switches_of(draft)
    if states:
        said[IDS] = list(states)
        head.num_aux_hidden_states = head.num_aux_layers = len(states)
    for key, value in said.items():
        setattr(head, key, value)
    setattr(head, SECTION, {**(getattr(head, SECTION, None) or {}), **said})


def reads_layers(head: Any) -> bool:
    """Return whether an EAGLE-3 head reads states of layers, by a settled configuration; else it reads the last."""
    section: dict[str, Any] = getattr(head, SECTION, None) or {}
    return bool(section.get("use_aux_hidden_state", True))


def _said(config: Mapping[str, Any], places: Iterable[Place]) -> Iterable[tuple[Place, Any]]:
    for place in places:
        part = config if place.section is None else config.get(place.section)
        if isinstance(part, Mapping) and part.get(place.key) is not None:
            yield place, part[place.key]


def _check_agreement(draft: Checkpoint, said: Mapping[Place, Any], what: str) -> None:
    for (place, first_value), (other_place, other_value) in pairwise(said.items()):
        if first_value != other_value:
            shown = [list(value) if isinstance(value, tuple) else value for value in (first_value, other_value)]
            raise draft.refused(
                f"{what} {shown[0]} by {place} in its config.json, and {shown[1]} by {other_place}; correct one of them"
            )
