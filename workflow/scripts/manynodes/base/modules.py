"""Environment modules in bash."""

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
