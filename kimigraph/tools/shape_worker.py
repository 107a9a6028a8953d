"""Worker of ``kimigraph.tools.shapes``: compiles one shape, run as a module.

Input: one JSON request on stdin. Output: JSON messages, one a line; what libraries print goes to stderr.
"""

import json
import sys
from contextlib import redirect_stdout
from typing import Any


def main() -> None:
    """Answer the request of stdin."""
    answers = sys.stdout

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    with redirect_stdout(sys.stderr):
        from kimigraph.tools.shapes import answer_to

        answer_to(json.loads(sys.stdin.readline()), say)


if __name__ == "__main__":
    main()
