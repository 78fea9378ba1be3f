"""The protocol by which the nodes of a run find each other, agree, and tell when one of them fails.

Node rank 0 (`group.py`) listens; each other node (`member.py`) connects, proves that it was asked the same
(`wire.py`), tells what it has (`hello.py`), and then starts its part of every attempt. `peers.py` is what the
supervisor's loop asks either side.
"""
