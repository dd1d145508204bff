"""Entry point: ``python -P -m checkpoint_executor.helper SPEC``."""

import sys

from checkpoint_executor.child import parse_spec
from checkpoint_executor.helper.service import serve

if __name__ == "__main__":
    serve(parse_spec(sys.argv))
