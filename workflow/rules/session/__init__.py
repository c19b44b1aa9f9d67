"""One Snakemake command: checks before its first job, messages and clean-up after its last.

The adapter between Snakemake and the library, with common.smk.
"""

import sys

from manynodes.base.errors import LONGEST_REPORT, one_line


def tell(line: str) -> None:
    # The line may contain text from results and logs.
    print(one_line(line, LONGEST_REPORT), file=sys.stderr, flush=True)
