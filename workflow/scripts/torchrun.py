"""torchrun, which starts in little more than half the CPU time, with a signed c10d rendezvous too.

The agents of torchrun's own c10d rendezvous unpickle the content of a store that answers everybody
who reaches its port, so everybody there can run code as the user who trains. This agent accepts a
state only from an agent with the job's secret.
"""

# ruff: noqa: E402
import gc
import sys
from types import ModuleType

# As in train.py.
gc.disable()

# What torch needs to know the shape of a result without computing it is a third of its import. An
# agent computes nothing.
UNNEEDED = ("torch._meta_registrations", "torch.distributed._meta_registrations")
sys.modules |= {name: ModuleType(name) for name in UNNEEDED}

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    create_handler,
)
from torch.distributed.run import main

from manynodes.base.errors import Refusal, told_in_one_line
from manynodes.base.signing import signed, verified

gc.freeze()
gc.enable()
# A plugin of the user's may need them.
for name in UNNEEDED:
    del sys.modules[name]

NAME = "c10d-signed"


class Signed(RendezvousBackend):
    """A rendezvous backend that signs the states it sends and verifies those it receives."""

    def __init__(self, backend: RendezvousBackend, run_id: str) -> None:
        self.backend, self.what = backend, f"rendezvous {run_id}"

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self.backend.get_state()
        return (self.verified(found[0]), found[1]) if found else None

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        found = self.backend.set_state(signed(self.what, state), token)
        return (self.verified(found[0]), found[1], found[2]) if found else None

    def verified(self, state: bytes) -> bytes:
        try:
            return verified(self.what, state)
        except Refusal as refusal:
            raise RendezvousStateError(str(refusal)) from None


def create(parameters: RendezvousParameters) -> RendezvousHandler:
    backend, store = create_backend(parameters)
    return create_handler(store, Signed(backend, parameters.run_id), parameters)


if __name__ == "__main__":
    with told_in_one_line("torchrun"):
        rendezvous_handler_registry.register(NAME, create)
        main()
