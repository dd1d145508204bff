"""A process that supervises a command, to be killed: ``supervise_parent_main COMMAND...``. Says the tree's pids."""

from __future__ import annotations

import json
import signal
import sys

from checkpoint_executor.process_tree import ProcessTree


def main() -> None:
    tree = ProcessTree(sys.argv[1:])
    print(json.dumps({"pid": tree.pid, "warden": tree.warden_pid}), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
