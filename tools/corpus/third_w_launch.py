"""Third held-out set: runs that the launchers end, or that end in a launcher's hands."""

from __future__ import annotations

from tools.corpus.capture import main
from tools.corpus.held_out_shell import shell

COMPOSE = "while IFS= read -r l; do printf 'trainer-1  | %s\\n' \"$l\"; done"
"""As `docker compose up` writes the lines of a service."""


@shell(
    "port-in-use",
    "w3-second-job",
    "python -m http.server 29840 --bind 0.0.0.0 > /dev/null 2>&1 & other=$!; sleep 2; "
    f"torchrun --nproc_per_node 1 --master_addr localhost --master_port 29840 train.py 2>&1 "
    f"| {COMPOSE}; kill $other",
)
def port_in_use():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    print("rank", dist.get_rank())


if __name__ == "__main__":
    main()
