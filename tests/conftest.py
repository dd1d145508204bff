"""Options of the whole suite. Shared code is in ``tests/support``: nothing imports from a conftest."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        choices=("soft", "cuda"),
        default="soft",
        help="device that the contract suite runs against",
    )
