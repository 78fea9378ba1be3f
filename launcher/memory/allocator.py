"""What torch's CUDA allocator takes from a device for a given order of allocations and frees. Pure.

The rules of c10/cuda/CUDACachingAllocator.cpp (round_size, get_pool, get_allocation_size,
get_free_block, should_split, free_block) with the sizes of c10/core/AllocatorConfig.h, torch 2.13, for
one stream and default options; or with `expandable_segments:True`. What is reserved never goes back.
Other options of the allocator are not followed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

MIB = 2**20
SMALLEST_BLOCK = 512
SMALL_REQUEST = 1 * MIB
"""Requests up to this size come from the small pool."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
"""Taken from the device for a request of less than `OWN_SEGMENT`."""
OWN_SEGMENT = 10 * MIB
"""Requests from this size on get a segment of their own, rounded up to `SEGMENT_ROUND`."""
SEGMENT_ROUND = 2 * MIB


VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables with the allocator's options; the first that is set counts (c10/cuda/CUDAAllocatorConfig.h,
`instance`, torch 2.13)."""
EXACT_PINNED = "pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"
"""Options under which page-locked buffers above 1 MiB are neither rounded up nor kept when they are freed.

Both: the first alone would file blocks of any size under powers of two, and hand one out for a larger
request (ATen/core/CachingHostAllocator.h, `get_free_block`, torch 2.13).
"""
EXACT_PINNED_FROM = "torch>=2.13"


def expandable_in(env: Mapping[str, str]) -> bool:
    """Whether these variables ask for expandable segments."""
    return _options(env).get("expandable_segments") == "True"


def rounds_pinned(env: Mapping[str, str]) -> bool:
    """Whether page-locked buffers are rounded up to powers of two under these variables."""
    return not {option.partition(":")[0] for option in EXACT_PINNED.split(",")} & _options(env).keys()


def power_of_two(size: int) -> int:
    """Bytes of the block for a page-locked buffer."""
    return 1 << (size - 1).bit_length() if size else 0


def _options(env: Mapping[str, str]) -> dict[str, str]:
    """The options that hold, `name:value,…`; torch takes the last one of a name."""
    value = next((env[name] for name in VARIABLES if name in env), "")
    named = (option.partition(":") for option in value.replace(" ", "").split(","))
    return {name: given for name, _, given in named}


def round_request(size: int) -> int:
    """Bytes of the block for a request: multiples of 512."""
    return max(SMALLEST_BLOCK, _up(size, SMALLEST_BLOCK))


def segment_size(block: int) -> int:
    """Bytes taken from the device when no free block is large enough."""
    if block <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if block < OWN_SEGMENT:
        return LARGE_SEGMENT
    return _up(block, SEGMENT_ROUND)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(slots=True)
class SegmentPart:
    """A stretch of a segment, with its neighbours there."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: SegmentPart | None = None
    after: SegmentPart | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


@dataclass(slots=True)
class CachingAllocator:
    """Blocks in two pools; each request takes the smallest free block that holds it."""

    expandable: bool
    """One segment a pool, which grows at its end."""
    reserved: int = 0
    allocated: int = 0
    peak_allocated: int = 0
    _pools: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _blocks: dict[int, SegmentPart] = field(default_factory=dict)
    """Free blocks by address."""
    _tails: dict[bool, SegmentPart] = field(default_factory=dict)
    """Last block of each expandable segment."""
    _next_segment: int = 0

    def allocate(self, size: int) -> SegmentPart:
        wanted = round_request(size)
        small = wanted <= SMALL_REQUEST
        block = self._find(wanted, small) or self._grow(wanted, small)
        block.free = False
        rest = block.size - wanted
        if rest >= SMALLEST_BLOCK if small or self.expandable else rest > SMALL_REQUEST:
            self._split(block, wanted)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: SegmentPart) -> None:
        """Free a block and merge it with free neighbours."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other)
                first, second = (other, block) if other is block.before else (block, other)
                self._join(first, second)
                block = first
        self._put(block)

    def _find(self, wanted: int, small: bool) -> SegmentPart | None:
        pool = self._pools[small]
        index = bisect_left(pool, (wanted, -1))
        if index == len(pool):
            return None
        block = self._blocks[pool[index][1]]
        if block is self._tails.get(small) and index + 1 < len(pool):
            # The end of a growing segment is kept for what fits nowhere else.
            block = self._blocks[pool[index + 1][1]]
        self._take(block)
        return block

    def _grow(self, wanted: int, small: bool) -> SegmentPart:
        if not self.expandable:
            size = segment_size(wanted)
            block = SegmentPart(self._next_segment, size, small)
            # Segments do not touch: their blocks never merge.
            self._next_segment += size + SEGMENT_ROUND
            self.reserved += size
            return block
        tail = self._tails.get(small)
        step = SMALL_SEGMENT if small else LARGE_SEGMENT
        if tail is not None and tail.free:
            self._take(tail)
            more = _up(wanted - tail.size, step)
            tail.size += more
        else:
            more = _up(wanted, step)
            # Each pool has an address range of its own.
            start = tail.address + tail.size if tail is not None else (0 if small else 1 << 60)
            block = SegmentPart(start, more, small, before=tail)
            if tail is not None:
                tail.after = block
            self._tails[small] = tail = block
        self.reserved += more
        return tail

    def _split(self, block: SegmentPart, wanted: int) -> None:
        rest = SegmentPart(block.address + wanted, block.size - wanted, block.small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = wanted, rest
        if self._tails.get(block.small) is block:
            self._tails[block.small] = rest
        self._put(rest)

    def _join(self, first: SegmentPart, second: SegmentPart) -> None:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if self._tails.get(first.small) is second:
            self._tails[first.small] = first

    def _put(self, block: SegmentPart) -> None:
        block.free = True
        self._blocks[block.address] = block
        insort(self._pools[block.small], block.key)

    def _take(self, block: SegmentPart) -> None:
        block.free = False
        del self._blocks[block.address]
        pool = self._pools[block.small]
        del pool[bisect_left(pool, block.key)]


def reserved_beyond_allocated(sizes: Sequence[int], events: Iterable[int], *, expandable: bool) -> int:
    """Bytes that are reserved beyond the most that is allocated, after replaying all events.

    sizes: bytes of each piece. events: a piece's index where it is allocated, its complement where freed.
    """
    allocator = CachingAllocator(expandable)
    held: dict[int, SegmentPart] = {}
    live = peak = 0
    for event in events:
        if event >= 0:
            live += sizes[event]
            peak = max(peak, live)
            held[event] = allocator.allocate(sizes[event])
        else:
            live -= sizes[~event]
            allocator.release(held.pop(~event))
    return allocator.reserved - peak
