"""accelerate launch, without the user's default configuration, which would change the plan."""

# ruff: noqa: E402
import os

# Only while it looks for that configuration: the program's models and data sets are below it too.
home = os.environ.get("HF_HOME")
os.environ["HF_HOME"] = os.devnull

import accelerate.commands.config  # noqa: F401

del os.environ["HF_HOME"]
if home is not None:
    os.environ["HF_HOME"] = home

from accelerate.commands.launch import main

if __name__ == "__main__":
    main()
