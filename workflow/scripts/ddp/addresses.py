"""Addresses of servers."""

from urllib.parse import urlsplit

from ddp.errors import Refusal


def refuse_credentials(url: str) -> None:
    """Refuse an address with a password in it, which Snakemake's own lines and logs would show.

    Raises:
        Refusal: there is one, or it is no address.
    """
    try:
        host = urlsplit(url).netloc
    except ValueError:
        raise Refusal("dataset.url is not an address of a server") from None
    if "@" in host:
        raise Refusal(
            "dataset.url has a user name or password in it, which logs would show; fetch the file yourself and set dataset.archive"
        )
