"""Two steps of the whole model from the tape of four layers: hand-written tapes, no model."""

from __future__ import annotations

from launcher.train.trace.extend import replay
from launcher.train.trace.tape import Piece, Segment, Tape

WEIGHT, STATE, KEPT, FLOW, GRADIENT = 100, 200, 10, 3, 50


class Writer:
    """Writes a tape as a recorder would."""

    def __init__(self):
        self.tape = Tape()

    def make(self, size, phase, kind="temporary"):
        self.tape.pieces.append(Piece(size, size, len(self.tape.events), phase, False, False, kind=kind))
        self.tape.events.append(len(self.tape.pieces) - 1)
        return len(self.tape.pieces) - 1

    def free(self, piece):
        self.tape.events.append(~piece)

    def mark(self, key):
        self.tape.segments.append(Segment(key, len(self.tape.events)))


def step(layers):
    """A model whose layers keep one piece, pass one on, and leave one gradient."""
    to = Writer()
    for _ in range(layers):
        to.make(WEIGHT, "build", "weights")
    to.mark("step/start")
    for _ in range(layers):
        to.make(STATE, "step", "optimizer")
    to.free(to.make(FLOW, "step"))
    to.mark("forward/start")
    kept, flow = [], to.make(FLOW, "forward")
    places = ["first", *["middle"] * (layers - 2), "last"]
    for place in places:
        to.mark(f"forward/stack0-{place}")
        kept.append(to.make(KEPT, "forward"))
        passed = to.make(FLOW, "forward")
        to.free(flow)
        flow = passed
    to.mark("forward/head")
    to.mark("backward/head")
    for place in reversed(places):
        to.mark(f"backward/stack0-{place}")
        to.make(GRADIENT, "backward", "gradients")
        passed = to.make(FLOW, "backward")
        to.free(flow)
        to.free(kept.pop())
        flow = passed
    to.free(flow)
    to.mark("clip/start")
    return to.tape


def followed(script):
    """Live bytes after every event; a piece is never allocated or freed twice."""
    live, bytes_held, rows = set(), 0, []
    for event in script["events"]:
        index = event if event >= 0 else ~event
        assert (index in live) == (event < 0)
        live.symmetric_difference_update({index})
        bytes_held += script["sizes"][index] if event >= 0 else -script["sizes"][index]
        rows.append(bytes_held)
    return rows


def test_the_script_of_deep_models_is_that_of_their_own_tape():
    for layers in (5, 6, 9):
        script = replay(step(4), step(2), [layers], keeps_gradients=False)
        whole = step(layers)
        whole.segments = [Segment(s.key.replace("-middle", "-inner"), s.start) for s in whole.segments]
        own = replay(whole, whole, [layers], keeps_gradients=False)
        assert followed(script) == followed(own)
        assert [script["sizes"][e] for e in script["events"] if e >= 0] == [
            own["sizes"][e] for e in own["events"] if e >= 0
        ]


def test_a_step_ends_with_weights_and_states_alone():
    rows = followed(replay(step(4), step(2), [8], keeps_gradients=False))
    assert rows[-1] == 8 * (WEIGHT + STATE)
    # The fullest moment is the second time that the first layer's backward pass makes what it hands down.
    assert max(rows) == 8 * (WEIGHT + STATE + GRADIENT) + KEPT + 2 * FLOW


def test_gradients_that_are_kept_are_there_from_the_beginning():
    tape, shallow = step(4), step(2)
    for one, layers in ((tape, 4), (shallow, 2)):
        one.pieces.extend(
            Piece(GRADIENT, GRADIENT, 0, "build", False, False, kind="gradients") for _ in range(layers)
        )
    rows = followed(replay(tape, shallow, [6], keeps_gradients=True))
    assert rows[-1] == 6 * (WEIGHT + STATE + GRADIENT)


def test_three_layers_are_replayed_as_they_were_traced():
    tape = step(3)
    rows = followed(replay(tape, tape, [3], keeps_gradients=False))
    assert rows[-1] == 3 * (WEIGHT + STATE)
