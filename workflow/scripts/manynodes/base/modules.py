"""Environment modules in bash."""

import shlex
from collections.abc import Sequence

# Where the shell function `module` comes from, in batch jobs too.
INITS = (
    "${LMOD_PKG:-}/init/bash",
    "${MODULESHOME:-}/init/bash",
    "/etc/profile.d/lmod.sh",
    "/etc/profile.d/modules.sh",
    "/usr/share/lmod/lmod/init/bash",
    "/usr/share/modules/init/bash",
)
# A line that makes it known to a shell to which no login shell has exported it.
FIND_MODULE = (
    "type module >/dev/null 2>&1 || for f in "
    + " ".join(f'"{path}"' for path in INITS)
    + '; do [ ! -r "$f" ] || { . "$f"; break; }; done'
)


def load_modules(names: Sequence[str]) -> str:
    """Lines that load modules, or end the shell.

    Of version 3.2, `module load` ends with 0 whatever happens: one that is not listed then, as an
    alias is not either, is asked for again. Not of later ones, whose names may be of several words.
    """
    words = shlex.join(names)
    return f"""module load {words} || exit 1
[[ ${{LMOD_CMD-}}${{MODULES_CMD-}} ]] || for f in {words}; do
  [[ :${{LOADEDMODULES-}}: == *:"$f"[:/]* || ! $(module load "$f" 2>&1) =~ ERROR:.* ]] ||
    {{ echo "$BASH_REMATCH" >&2; exit 1; }}
done"""
