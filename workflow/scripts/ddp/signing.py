"""Values that come over a network, or through a store, that others may write to: signed with a secret of the job.

`launch` makes the secret and hands it to the ranks in their environment, on this machine through a pipe, and through srun's standard input
to other nodes; it is on no command line and in no file.
"""

import hashlib
import hmac
import os
import secrets

from ddp.errors import Refusal

VARIABLE = "RUN_SECRET"
LEAST = 32  # bytes
SIZE = hashlib.sha256().digest_size


def new_secret() -> str:
    """A secret for one job."""
    return secrets.token_hex(32)


def key() -> bytes:
    """The job's secret.

    Raises:
        Refusal: there is none, or it is short enough to be guessed.
    """
    secret = os.fsencode(os.environ.get(VARIABLE, ""))
    if len(secret) < LEAST:
        raise Refusal(
            f"{VARIABLE} is not set, or shorter than {LEAST} characters: start the processes with launch.py, "
            "or give all of them the same secret text"
        )
    return secret


def signature(what: str, content: bytes) -> bytes:
    return hmac.digest(key(), what.encode() + b"\0" + content, "sha256")


def signed(what: str, content: bytes) -> bytes:
    """The content with its signature in front.

    Args:
        what: tells it from every other value of the job, so that none can be put in another's place.
    """
    return signature(what, content) + content


def verified(what: str, received: bytes) -> bytes:
    """The content of what `signed` gave.

    Raises:
        Refusal: it is not signed with the job's secret, or as another value.
    """
    content = received[SIZE:]
    if not hmac.compare_digest(received[:SIZE], signature(what, content)):
        raise Refusal(f"{what}: what was received is not signed with this job's secret; see who else can reach the job's ports")
    return content
