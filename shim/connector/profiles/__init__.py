"""What each KV connector does with its transfer params, as data. See `table` for the data itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shim.connector.profiles.model import Granule, Mode, Peer, Profile, Side, Variant
from shim.connector.profiles.table import PROFILES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shim.connector.profiles.keys import Key

__all__ = ["PROFILES", "Granule", "Mode", "Peer", "Profile", "Side", "Variant", "profile_for"]


def profile_for(name: str, children: Sequence[str] = ()) -> Profile:
    """The profile of a connector.

    Args:
        name: its registered name, or its class's name. `package.module:Class` and names that no
            profile knows are observed only.
        children: the names in a `MultiConnector`'s `connectors`, in their order.
    """
    if name == "MultiConnector":
        return _union(name, [profile_for(child) for child in children])
    return PROFILES.get(name) or Profile(name, known=False, params_needed=False)


def _union(name: str, children: list[Profile]) -> Profile:
    """The union of children: they share one dict, and every one of them is asked (multi_connector.py)."""
    known = [child for child in children if child.known]
    if not known:
        return Profile(name, known=False, params_needed=False)
    keys: dict[str, Key] = {}
    modes: list[Mode] = []
    for child in known:
        # The first child's rule stands where two know one key: such pairs mean the same by it.
        keys = {**child.keys, **keys}
        modes += [mode for mode in child.modes if mode not in modes]
    unasked = [child.loads_unasked for child in known if child.loads_unasked]
    readbacks = [child.readback for child in known if child.readback]
    issuing = [child for child in known if child.issues]
    return Profile(
        name,
        keys=keys,
        modes=tuple(modes),
        readback=readbacks[0] if readbacks else None,
        flags=next((child.flags for child in known if child.flags), ()),
        handoff_keys=_all(child.handoff_keys for child in known),
        loads_unasked=unasked[0] if unasked else None,
        # A child that loads by itself (LMCache, Offloading) makes missing params no fault of its own,
        # but the child that needs them still got none.
        spent_key=next((child.spent_key for child in known if child.spent_key), ""),
        params_needed=any(child.params_needed for child in known),
        reads_extra_args=any(child.reads_extra_args for child in known),
        issues=bool(issuing),
        issues_on_stop=any(child.issues_on_stop for child in issuing),
        fatal_without_output=_all(child.fatal_without_output for child in known),
        back_off=max(child.back_off for child in known),
        granule=Granule.CHUNK if any(c.granule is Granule.CHUNK for c in known) else known[0].granule,
    )


def _all(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item for group in groups for item in group))
