"""The ``vllm`` command in a process of its own, with the tests' platform: ``python -m ... serve MODEL ...``."""

from __future__ import annotations

import sys

from tests.support.vllm_harness import install_plugins


def main() -> None:
    install_plugins()
    sys.argv[0] = "vllm"
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


# The engine core is spawned, which imports this module once more.
if __name__ == "__main__":
    main()
