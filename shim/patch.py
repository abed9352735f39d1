"""Wraps a method of vLLM's, once a process: vLLM runs plugins several times, and configs are built often."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_WRAPPED = "_kv_shim_installed"


def wrap_once(owner: type[Any], name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make(original)`, unless that was done before.

    Args:
        owner: the class.
        name: of the method.
        make: gets the original and returns what takes its place, which looks like it.
    """
    original = getattr(owner, name)
    if getattr(original, _WRAPPED, False):
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _WRAPPED, True)
    setattr(owner, name, replacement)
