"""Server addresses."""

from urllib.parse import urlsplit

from ddp.base.errors import Refusal


def refuse_credentials(url: str) -> None:
    """Refuse an address with a password, which Snakemake and logs would show.

    Raises:
        Refusal: it has one, or is not an address.
    """
    try:
        host = urlsplit(url).netloc
    except ValueError:
        raise Refusal("dataset.url is not an address of a server") from None
    if "@" in host:
        raise Refusal(
            "dataset.url has a user name or password in it, which logs would show; fetch the file "
            "yourself and set dataset.archive"
        )
