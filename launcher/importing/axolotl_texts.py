"""axolotl's texts and pairs that are streamed, packed or too long, where a recipe treats them otherwise."""

from __future__ import annotations

from typing import Any

from launcher.importing.arguments import as_bool
from launcher.importing.found import Effect
from launcher.importing.peer import Peer


def take_long_pairs(peer: Peer, given: str | None) -> None:
    """Pairs that are longer than sequence_len: their answers are cut here, whatever the strategy is there."""
    said, line = "excess_length_strategy", peer.line("excess_length_strategy")
    peer.reading.take("data.overlong", "truncate", line, f"{said}: {given or 'drop'}")
    if given != "truncate":
        there = "stops at" if given == "raise" else "leaves out"
        reason = f"axolotl {there} pairs longer than sequence_len; here their answers are cut at the end"
        peer.reading.drop(said, given or "drop", line, Effect.TRAINING, reason)


def first_pretraining(peer: Peer, given: Any) -> list[Any]:
    """The entry of a pretraining_dataset that axolotl reads; the others are listed."""
    entries = given if isinstance(given, list) else [given]
    for index, entry in list(enumerate(entries))[1:]:
        line = peer.line(f"pretraining_dataset[{index}]") or peer.line("pretraining_dataset")
        reason = "axolotl reads the first pretraining_dataset alone"
        peer.reading.drop(f"pretraining_dataset[{index}]", entry, line, Effect.NONE, reason)
    return entries[:1]


def take_packs(peer: Peer) -> None:
    """Texts of a pretraining_dataset: pieces in packs, texts joined one after another, or each for itself."""
    packed, joined = peer.switch("sample_packing"), peer.switch("pretraining_sample_concatenation")
    apart = as_bool(peer.get("pretrain_multipack_attn")) is not False
    if packed:
        peer.take("data.packing", True, "sample_packing")
    elif joined:
        peer.take("data.packing", True, "pretraining_sample_concatenation")
    if (packed and not apart) or (joined and not packed):
        key = "pretrain_multipack_attn" if packed else "pretraining_sample_concatenation"
        peer.drop(key, Effect.TRAINING, "documents of a pack see each other there; here none sees another")
    if packed:
        peer.default(
            "data.overlong", "split", "sample_packing: true", "there the pieces overlap by 256 tokens"
        )
    else:
        note = "axolotl splits texts with sample_packing: true only"
        peer.default("data.overlong", "truncate", "sample_packing: false", note)


def list_streamed(peer: Peer) -> None:
    """Streamed and packed, axolotl reads the first of several data sets."""
    given = peer.values.get("datasets")
    if peer.switch("sample_packing") and isinstance(given, list) and len(given) > 1:
        reason = "with streaming and sample_packing axolotl reads the first data set alone; here all are read"
        peer.reading.drop("datasets[1]", "{…}", peer.line("datasets"), Effect.TRAINING, reason)
