"""What every other package may use: errors, files, provenance, the contract with a program.

In: nothing of this library. Out: one-line refusals, atomic and strict files, code hashes.
"""

import locale
import sys
from contextlib import suppress

# All text files are UTF-8, whatever the user's locale is: the default encoding of `open` follows
# this. Messages that the terminal cannot show are escaped.
if locale.getpreferredencoding(False).lower().replace("-", "") != "utf8":
    for name in ("C.UTF-8", "C.utf8", "en_US.UTF-8"):
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            break
# Whatever the locale is, PYTHONIOENCODING may say something else.
for stream in (sys.stdout, sys.stderr):
    with suppress(AttributeError):
        if stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
