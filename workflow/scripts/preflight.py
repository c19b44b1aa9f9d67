"""Check that all processes of a run connect, have the right devices and can sum."""

# ruff: noqa: E402
import argparse
import gc

# As in train.py.
gc.disable()

from manynodes.base.environment import Environment
from manynodes.base.errors import told_in_one_line
from manynodes.ranks.process_group import failing_at_once, gather, process_group

gc.freeze()
gc.enable()


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    device = Environment.read().device or "auto"
    with failing_at_once(), told_in_one_line("preflight"), process_group(device) as process:
        # A process that ends while another one still connects would fail it.
        gather("connected", process)


if __name__ == "__main__":
    main()
