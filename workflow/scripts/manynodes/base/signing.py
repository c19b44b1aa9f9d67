"""Signatures for values that cross a network or a store to which others may write.

`launch` makes a secret for each job. The ranks get it in their environment: through a pipe on this
machine, through srun's standard input on other nodes, or from a file that only this user can read.
It is on no command line.
"""

import hashlib
import hmac
import os
import secrets

from manynodes.base.environment import Environment, variable
from manynodes.base.errors import Refusal

LEAST = 32  # bytes
SIZE = hashlib.sha256().digest_size


def new_secret() -> str:
    """A new secret for one job."""
    return secrets.token_hex(32)


def key(given: str | None = None) -> bytes:
    """The job's secret.

    Args:
        given: by who has removed it from this process's environment.

    Raises:
        Refusal: it is missing, or short enough to be guessed.
    """
    secret = os.fsencode(given or Environment.read().secret or "")
    if len(secret) < LEAST:
        raise Refusal(
            f"{variable('secret')} is not set, or shorter than {LEAST} characters: start the "
            "processes with launch.py, "
            "or give all of them the same secret text"
        )
    return secret


def signature(what: str, content: bytes, secret: str | None = None) -> bytes:
    return hmac.digest(key(secret), what.encode() + b"\0" + content, "sha256")


def signed(what: str, content: bytes, secret: str | None = None) -> bytes:
    """The content with its signature in front.

    Args:
        what: name of the value, unique in the job, so that no value can replace another.
        secret: as for `key`.
    """
    return signature(what, content, secret) + content


def verified(what: str, received: bytes, secret: str | None = None) -> bytes:
    """The content of a signed value.

    Args:
        what, secret: as for `signed`.

    Raises:
        Refusal: it was not signed with the job's secret, or under another name.
    """
    content = received[SIZE:]
    if not hmac.compare_digest(received[:SIZE], signature(what, content, secret)):
        raise Refusal(
            f"{what}: the received value is not signed with this job's secret; check who else can "
            "reach the job's ports"
        )
    return content
