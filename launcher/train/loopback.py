"""Make torch's rendezvous listen on 127.0.0.1 alone if all ranks are on this node.

Its TCPStore listens on all interfaces, whatever address it is given, without a password: whoever reaches its
port can read and write it. `python -m launcher.train.loopback` is `accelerate launch`, whose process has the
store of its ranks.
"""

from __future__ import annotations

import importlib
import socket
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost")
_MAKERS = ("torch.distributed.rendezvous", "torch.distributed.elastic.rendezvous.static_tcp_rendezvous")
"""Modules of torch (2.8 to 2.13) that create a TCPStore by its global name."""


def keep_stores_local() -> None:
    """Let every store that this process creates for ranks of this node listen on 127.0.0.1."""
    for name in _MAKERS:
        importlib.import_module(name).TCPStore = make_store  # type: ignore[attr-defined]


def make_store(host_name: str, port: int, *args: Any, **kwargs: Any) -> Any:
    """torch's TCPStore(host_name, port, world_size, is_master, …), which serves a loopback address there."""
    from torch.distributed import TCPStore

    serves = kwargs.get("is_master", args[1] if len(args) > 1 else False)
    if serves and host_name in LOOPBACK:
        try:
            listener = socket.create_server(("127.0.0.1", port), backlog=socket.SOMAXCONN)
        except OSError:  # taken: by an earlier store of this process, which is shared, or an error of torch's
            return TCPStore(host_name, port, *args, **kwargs)
        kwargs["master_listen_fd"] = listener.detach()
    return TCPStore(host_name, port, *args, **kwargs)


def main() -> None:
    """`accelerate launch` with such a store."""
    keep_stores_local()
    from accelerate.commands.launch import main as launch

    launch()


if __name__ == "__main__":
    main()
