"""The fingerprint: the numpy reference, and the kernel's source run on the host. ``tests/gpu`` runs the kernel
itself."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from checkpoint_executor.workers import cuda_hash
from checkpoint_executor.workers.cuda_hash import reference_fingerprint

SIZES = (1, 15, 16, 31, 32, 1023, 1024, 1025, 2048, 5000, 300_007)


def test_every_changed_byte_changes_both_lanes() -> None:
    data = bytearray(os.urandom(3000))
    before = reference_fingerprint(data)
    for position in range(len(data)):
        data[position] ^= 0x80
        after = reference_fingerprint(data)
        assert after[:8] != before[:8]
        assert after[8:16] != before[8:16]
        data[position] ^= 0x80
    assert reference_fingerprint(data) == before


def test_position_and_size_count_even_among_zeros() -> None:
    seen = {reference_fingerprint(bytes(size)) for size in range(1, 2100)}
    for position in range(2100):
        data = bytearray(2100)
        data[position] = 1
        seen.add(reference_fingerprint(data))
    assert len(seen) == 2099 + 2100


def test_swapped_parts_change_both_lanes() -> None:
    parts = [os.urandom(1 << 10) for _ in range(4)]
    hashes = [reference_fingerprint(b"".join(order)) for order in itertools.permutations(parts)]
    assert len({each[:8] for each in hashes}) == len({each[8:16] for each in hashes}) == len(hashes)


def test_sign_flips_of_two_numbers_do_not_cancel_out() -> None:
    # The least that an arithmetic hash mixes: the highest bit of two words, in every pair of places of a small tensor.
    data = bytearray(os.urandom(1024))
    seen = {reference_fingerprint(data)[:8], reference_fingerprint(data)[8:16]}
    pairs = list(itertools.combinations(range(7, 1024, 8), 2))
    for first, second in pairs:
        data[first] ^= 0x80
        data[second] ^= 0x80
        changed = reference_fingerprint(data)
        seen |= {changed[:8], changed[8:16]}
        data[first] ^= 0x80
        data[second] ^= 0x80
    assert len(seen) == 2 * (len(pairs) + 1)


def test_the_output_is_balanced() -> None:
    ones = [0] * 128
    samples = 4000
    for number in range(samples):
        low, high, _ = struct.unpack("<QQQ", reference_fingerprint(number.to_bytes(8, "little")))
        for bit in range(128):
            ones[bit] += (low | high << 64) >> bit & 1
    # Six standard deviations.
    assert all(abs(count - samples / 2) < 6 * (samples / 4) ** 0.5 for count in ones)


#: What the kernel takes from CUDA, for one thread after the other. The sum over a warp is left out below.
_HOST_CUDA = """
struct ulonglong2 { unsigned long long x, y; };
static ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads, blocks)
template <class T> static T __ldcs(const T *p) { return *p; }
static void atomicAdd(unsigned long long *sum, unsigned long long value) { *sum += value; }
"""
_HOST_LAUNCH = """
extern "C" void launch(const unsigned char *data, u64 size, unsigned blocks, unsigned threads, u64 *result) {
  blockDim.x = threads;
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) fingerprint(data, size, result);
}
"""


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_kernels_source_computes_the_reference(tmp_path: Path, blocks: int) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is needed to run the kernel's source on the host")
    kernel, replaced = re.subn(r"  for \(int distance.*?\n  \}\n", "", cuda_hash.kernel_source(), flags=re.DOTALL)
    assert replaced == 1
    source, library = tmp_path / "kernel.cpp", tmp_path / "kernel.so"
    source.write_text(_HOST_CUDA + kernel.replace("if (lane == 0)", "if (true)") + _HOST_LAUNCH)
    subprocess.run(["g++", "-O1", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    launch = ctypes.CDLL(str(library)).launch
    for size in SIZES:
        data = os.urandom(size)
        sums = (ctypes.c_uint64 * 2)()
        aligned = ctypes.create_string_buffer(size + 16)
        start = -(-ctypes.addressof(aligned) // 16) * 16
        ctypes.memmove(start, data, size)
        launch(ctypes.c_void_p(start), ctypes.c_uint64(size), blocks, 256, sums)
        assert struct.pack("<QQQ", *sums, size) == reference_fingerprint(data)
