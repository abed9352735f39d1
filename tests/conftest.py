"""What all layers share: tests that start real servers carry the mark `e2e`."""

from __future__ import annotations

from pathlib import Path

import pytest

E2E = Path(__file__).parent / "e2e"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything below tests/e2e, so that `-m "not e2e"` leaves it out."""
    for item in items:
        if E2E in item.path.parents:
            item.add_marker(pytest.mark.e2e)
