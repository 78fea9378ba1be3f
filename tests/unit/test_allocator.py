"""The rules of torch's CUDA caching allocator, one test each."""

import pytest

from launcher.memory.allocator import (
    LARGE_SEGMENT,
    MIB,
    SMALL_SEGMENT,
    CachingAllocator,
    expandable_in,
    reserved_beyond_allocated,
    round_request,
    segment_size,
)


@pytest.mark.parametrize(
    ("size", "block"), [(0, 512), (1, 512), (512, 512), (513, 1024), (10 * MIB + 1, 10 * MIB + 512)]
)
def test_requests_are_rounded_to_512_bytes(size, block):
    assert round_request(size) == block


@pytest.mark.parametrize(
    ("block", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_what_a_request_takes_from_the_device(block, segment):
    assert segment_size(block) == segment
    allocator = CachingAllocator(expandable=False)
    allocator.allocate(block)
    assert allocator.reserved == segment


def test_small_and_large_requests_share_no_segment():
    allocator = CachingAllocator(expandable=False)
    allocator.allocate(512)
    allocator.allocate(2 * MIB)
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT


def test_a_small_block_is_split_down_to_512_bytes():
    allocator = CachingAllocator(expandable=False)
    for _ in range(4096):
        allocator.allocate(512)
    assert allocator.reserved == SMALL_SEGMENT
    allocator.allocate(512)
    assert allocator.reserved == 2 * SMALL_SEGMENT


def test_a_large_block_is_split_when_more_than_a_mebibyte_is_left():
    allocator = CachingAllocator(expandable=False)
    first = allocator.allocate(30 * MIB)
    allocator.release(first)
    assert allocator.allocate(29 * MIB).size == 30 * MIB  # a rest of exactly 1 MiB stays with the block
    allocator = CachingAllocator(expandable=False)
    allocator.release(allocator.allocate(30 * MIB))
    assert allocator.allocate(29 * MIB - 512).size == 29 * MIB - 512


def test_the_smallest_block_that_fits_is_taken():
    allocator = CachingAllocator(expandable=False)
    large, small = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.release(large)
    allocator.release(small)
    assert allocator.allocate(20 * MIB).address == small.address
    assert allocator.reserved == 60 * MIB


def test_neighbours_merge_within_a_segment_only():
    allocator = CachingAllocator(expandable=False)
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]  # one segment of 20 MiB
    assert allocator.reserved == 20 * MIB
    for block in (blocks[1], blocks[3], blocks[2], blocks[0]):
        allocator.release(block)
    assert allocator.allocate(20 * MIB).size == 20 * MIB
    assert allocator.reserved == 20 * MIB
    apart = [allocator.allocate(12 * MIB) for _ in range(2)]
    for block in apart:
        allocator.release(block)
    allocator.allocate(24 * MIB)
    assert allocator.reserved == 20 * MIB + 24 * MIB + 24 * MIB


def test_freed_memory_stays_reserved_and_is_used_again():
    allocator = CachingAllocator(expandable=False)
    for _ in range(3):
        allocator.release(allocator.allocate(50 * MIB))
    assert (allocator.reserved, allocator.allocated, allocator.peak_allocated) == (50 * MIB, 0, 50 * MIB)


def test_expandable_segments_grow_instead_of_leaving_gaps():
    # Two freed tensors of 12 MiB make room for one of 24 only where they are neighbours.
    sizes, events = [12 * MIB, 12 * MIB, 24 * MIB], [0, 1, ~0, ~1, 2]
    assert reserved_beyond_allocated(sizes, events, expandable=False) == 24 * MIB
    grown = reserved_beyond_allocated(sizes, events, expandable=True)
    assert grown == 40 * MIB - 24 * MIB  # two steps of 20 MiB


def test_the_end_of_an_expandable_segment_is_kept_for_what_fits_nowhere_else():
    allocator = CachingAllocator(expandable=True)
    first = allocator.allocate(25 * MIB)
    allocator.allocate(5 * MIB)  # leaves 10 MiB at the end
    allocator.release(first)
    assert allocator.allocate(6 * MIB).address == first.address


def test_replay_reports_what_is_reserved_beyond_the_peak():
    sizes = [30 * MIB, 10 * MIB + 1]
    assert reserved_beyond_allocated(sizes, [0, ~0, 1], expandable=False) == 0
    assert reserved_beyond_allocated(sizes, [0, 1], expandable=False) == 2 * MIB - 1


@pytest.mark.parametrize(
    ("options", "expandable"),
    [
        ("", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:128, expandable_segments:True", True),
        ("expandable_segments:True,expandable_segments:False", False),
        ("roundup_power2_divisions:[256:1,512:2]", False),
    ],
)
def test_the_environment_says_whether_segments_grow(options, expandable):
    assert expandable_in({"PYTORCH_ALLOC_CONF": options}) is expandable
