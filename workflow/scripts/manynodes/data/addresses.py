"""Server addresses."""

import ipaddress
import socket
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from manynodes.base.errors import Refusal


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


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but none from a public server to a private address: a request from this
    machine reaches services there that the server does not.
    """

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if is_private(newurl) and not is_private(req.full_url):
            raise urllib.error.URLError("it redirects to a private address; give that one itself")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def is_private(url: str) -> bool:
    """Whether a server's name stands for an address that is not public. One that this machine
    cannot resolve is left to its proxy.
    """
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, None)
    except (OSError, ValueError):
        return False
    return not all(ipaddress.ip_address(entry[4][0]).is_global for entry in found)
