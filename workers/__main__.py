"""Entry point: ``python -P -m checkpoint_executor.workers SPEC``."""

import sys

from checkpoint_executor.child import parse_spec
from checkpoint_executor.workers.service import serve

if __name__ == "__main__":
    serve(parse_spec(sys.argv))
