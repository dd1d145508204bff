"""A fingerprint of device memory, taken on the device at memory speed: the proof that a backup is still right.

Knows the hash and how to run it. Does not know what is hashed or what follows from it.

The hash has two lanes of 64 bits. Memory is cut into blocks of 32 bytes; each lane passes the four words of a block,
keyed with the block's position, through a chain of bijective rounds (lane 1 in the opposite order) and adds the
result up modulo 2**64. So a change of one word always changes both lanes, since every step of the chain is a bijection
of the word that enters it; changes of several words cancel out in both lanes with probability 2**-128, as far as the
rounds are random. Addition commutes, so the order in which blocks finish does not matter. It guards against accidents
(an optimiser step, a swap of two tensors), not against someone who builds a collision.

Why NVRTC: torch's operations would read the memory several times and need scratch of its size, Triton may be absent,
and a C++ extension is ruled out. NVRTC comes with torch. Without it nothing is proven, so everything is copied.

Scratch is 1 MiB, taken once: at sleep time the device may be full.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from checkpoint_executor.workers.cuda_calls import PrimaryContext, bindings, call

if TYPE_CHECKING:
    import numpy

__all__ = ["GpuHasher", "Hasher", "compile_cubin", "kernel_source", "open_hasher", "reference_fingerprint"]

_log = logging.getLogger(__name__)

#: The golden ratio, and odd multipliers of well-tested mixers: SplitMix64, MurmurHash3, wyhash and rrmxmx.
_KEY = 0x9E3779B97F4A7C15
_ROUNDS = (
    (
        0xBF58476D1CE4E5B9,
        0x94D049BB133111EB,
        0xFF51AFD7ED558CCD,
        0xC4CEB9FE1A85EC53,
        0xD6E8FEB86659FD93,
        0xA0761D6478BD642F,
    ),
    (
        0xE7037ED1A0B428DB,
        0x8EBC6AF09C88C6E3,
        0x589965CC75374CC3,
        0x1D8E4E27C47D124F,
        0xEB44ACCAB455D165,
        0x9FB21C651E98DF25,
    ),
)

#: A tile is what a warp reads at once: 32 lanes, two loads of 16 bytes each, both coalesced. Lane n's block is
#: the n-th 16 bytes of the tile's first half and of its second.
_TILE_BYTES = 1024
_THREADS = 256
_BLOCKS_PER_SM = 4
#: Regions hashed before their sums are fetched; each takes 16 bytes of scratch.
_REGIONS_AT_ONCE = 1 << 16
#: And bytes: 1 GiB takes about 0.3 ms, so that the caller can act on the first sums early.
_BYTES_AT_ONCE = 1 << 30
#: Below this many tiles for each warp, more blocks only cost launch time.
_TILES_PER_WARP = 4

_SOURCE = r"""
typedef unsigned long long u64;

__device__ __forceinline__ u64 round64(u64 v, u64 multiplier) { return (v ^ (v >> 32)) * multiplier; }

__device__ __forceinline__ u64 chain(u64 k, u64 w0, u64 w1, u64 w2, u64 w3, u64 m0, u64 m1, u64 m2, u64 m3, u64 m4,
                                     u64 m5) {
  u64 t = round64(w0 ^ k, m0);
  t = round64(t + w1, m1);
  t = round64(t + w2, m2);
  t = round64(t + w3, m3);
  t = round64(t, m4);
  t = round64(t, m5);
  return t ^ (t >> 32);
}

__device__ __forceinline__ void absorb(ulonglong2 p, ulonglong2 q, u64 block, u64 &a, u64 &b) {
  const u64 k = (block + 1) * KEY;
  a += chain(k, p.x, p.y, q.x, q.y, A0, A1, A2, A3, A4, A5);
  b += chain(k, q.y, q.x, p.y, p.x, B0, B1, B2, B3, B4, B5);
}

/* 16 bytes at an offset, zero beyond the end. */
__device__ ulonglong2 load_tail(const unsigned char *data, u64 size, u64 offset) {
  u64 word[2] = {0, 0};
  for (int i = 0; i < 16; ++i)
    if (offset + i < size) word[i / 8] |= (u64)data[offset + i] << (8 * (i % 8));
  return make_ulonglong2(word[0], word[1]);
}

extern "C" __global__ void __launch_bounds__(256, 4)
fingerprint(const unsigned char *data, u64 size, u64 *result) {
  const u64 tiles = size / 1024;
  const unsigned lane = threadIdx.x % 32;
  const u64 warp = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const u64 warps = (u64)gridDim.x * blockDim.x / 32;
  const ulonglong2 *words = (const ulonglong2 *)data;
  u64 a = 0, b = 0;
  u64 tile = warp;
  for (; tile + 3 * warps < tiles; tile += 4 * warps) {  /* four tiles' loads in flight */
    ulonglong2 p[4], q[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const ulonglong2 *at = words + (tile + i * warps) * 64 + lane;
      p[i] = __ldcs(at);
      q[i] = __ldcs(at + 32);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) absorb(p[i], q[i], (tile + i * warps) * 32 + lane, a, b);
  }
  for (; tile < tiles; tile += warps) {
    const ulonglong2 *at = words + tile * 64 + lane;
    absorb(__ldcs(at), __ldcs(at + 32), tile * 32 + lane, a, b);
  }
  if (warp == 0 && size % 1024) {
    const u64 offset = tiles * 1024 + lane * 16;
    absorb(load_tail(data, size, offset), load_tail(data, size, offset + 512), tiles * 32 + lane, a, b);
  }
  for (int distance = 16; distance; distance /= 2) {
    a += __shfl_down_sync(~0u, a, distance);
    b += __shfl_down_sync(~0u, b, distance);
  }
  if (lane == 0) {
    atomicAdd(result, a);
    atomicAdd(result + 1, b);
  }
}
"""


class Hasher(Protocol):
    """Fingerprints of (address, bytes) regions of device memory, in order, each as soon as it is known; equal ones
    prove equal contents and size."""

    def __call__(self, regions: Sequence[tuple[int, int]]) -> Iterable[bytes]: ...


def open_hasher(context: PrimaryContext) -> Hasher | None:
    """A hasher for the device; None, and a word about it in the log, where the kernel cannot be had."""
    try:
        return GpuHasher(context)
    except Exception as error:  # noqa: BLE001 - the bindings raise what they like if NVRTC is missing or too old
        _log.warning("unchanged weights are copied at every sleep, since they cannot be hashed: %s", error)
        return None


class GpuHasher:
    """Runs the hash on one device, by NVRTC and the driver.

    Raises:
        ImportError, RuntimeError, DriverError: no NVRTC, or it refused the kernel. MemoryError: no room for 1 MiB.
    """

    def __init__(self, context: PrimaryContext) -> None:
        self._context = context
        self._processors = context.attribute("MULTIPROCESSOR_COUNT")
        context.make_current()
        self._cubin = compile_cubin(kernel_source(), context.architecture)
        self._module = call("cuModuleLoadData", ctypes.addressof(self._cubin))
        self._kernel = call("cuModuleGetFunction", self._module, b"fingerprint")
        self._stream = call("cuStreamCreate", int(bindings().CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._scratch = int(call("cuMemAlloc", 16 * _REGIONS_AT_ONCE))

    def __call__(self, regions: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Fingerprints, in order, some regions at a time: what the caller does between them overlaps with nothing of
        the hash, so it should only submit work. It has made sure that nothing writes to the regions meanwhile.

        Raises:
            ValueError: an address that is not a multiple of 16.
        """
        if any(address % 16 for address, _ in regions):
            raise ValueError("a region must begin at a multiple of 16 bytes")
        self._context.make_current()
        return (fingerprint for group in _groups(regions) for fingerprint in self._hash(group))

    def _hash(self, regions: Sequence[tuple[int, int]]) -> list[bytes]:
        sums = (ctypes.c_uint64 * (2 * len(regions)))()
        call("cuMemsetD8Async", self._scratch, 0, ctypes.sizeof(sums), self._stream)
        for index, (address, size_bytes) in enumerate(regions):
            self._launch(address, size_bytes, self._scratch + 16 * index)
        call("cuMemcpyDtoHAsync", ctypes.addressof(sums), self._scratch, ctypes.sizeof(sums), self._stream)
        call("cuStreamSynchronize", self._stream)
        return [
            struct.pack("<QQQ", sums[2 * index], sums[2 * index + 1], size_bytes)
            for index, (_, size_bytes) in enumerate(regions)
        ]

    def _launch(self, address: int, size_bytes: int, result: int) -> None:
        tiles = -(-size_bytes // _TILE_BYTES)
        useful = -(-tiles // (_TILES_PER_WARP * _THREADS // 32))
        blocks = max(1, min(useful, self._processors * _BLOCKS_PER_SM))
        values = (ctypes.c_uint64(address), ctypes.c_uint64(size_bytes), ctypes.c_uint64(result))
        # The driver copies the arguments before it returns.
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        arguments = ctypes.addressof(pointers)
        call("cuLaunchKernel", self._kernel, blocks, 1, 1, _THREADS, 1, 1, 0, self._stream, arguments, 0)


def _groups(regions: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """The regions in order, cut into groups that end once they hold enough bytes or regions."""
    start = held_bytes = 0
    for end, (_, size_bytes) in enumerate(regions, 1):
        held_bytes += size_bytes
        if held_bytes >= _BYTES_AT_ONCE or end - start == _REGIONS_AT_ONCE:
            yield regions[start:end]
            start, held_bytes = end, 0
    if start < len(regions):
        yield regions[start:]


def kernel_source() -> str:
    """The kernel in CUDA C++, with the same constants as the reference."""
    defines = {"KEY": _KEY}
    for lane, multipliers in zip("AB", _ROUNDS, strict=True):
        defines.update({f"{lane}{index}": value for index, value in enumerate(multipliers)})
    return "".join(f"#define {name} {value:#x}ULL\n" for name, value in defines.items()) + _SOURCE


def compile_cubin(source: str, architecture: str) -> Any:
    """CUDA C++ compiled for an architecture (``sm_90``), as a ctypes buffer; not PTX, which is compiled when it loads.

    Raises:
        ImportError: no bindings of NVRTC. RuntimeError: no NVRTC, or an error in the source, with the compiler's words.
    """
    import cuda.bindings.nvrtc as nvrtc

    def checked(result: tuple[Any, ...]) -> Any:
        code, *values = result
        if int(code) != 0:
            raise RuntimeError(f"NVRTC: {getattr(code, 'name', code)}")
        return values[0] if values else None

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        options = [f"--gpu-architecture={architecture}".encode()]
        result = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(result[0]) != 0:
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"NVRTC refused the source for {architecture}: {log.decode(errors='replace').strip()}")
        cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return ctypes.create_string_buffer(cubin, len(cubin))


def reference_fingerprint(data: bytes | bytearray | memoryview) -> bytes:
    """The same hash of host memory, in numpy: what the kernel is tested against."""
    import numpy as np

    size_bytes = len(data)
    padded = np.zeros(-(-size_bytes // _TILE_BYTES) * _TILE_BYTES, dtype=np.uint8)
    padded[:size_bytes] = np.frombuffer(data, dtype=np.uint8)
    # tile, half, lane, word -> block (tile and lane), word 0 to 3
    tiles = padded.view("<u8").reshape(-1, 2, 32, 2)
    words = tiles.transpose(0, 2, 1, 3).reshape(-1, 4)
    key = (np.arange(1, len(words) + 1, dtype=np.uint64)) * np.uint64(_KEY)
    first = _reference_chain(key, [words[:, index] for index in (0, 1, 2, 3)], _ROUNDS[0])
    second = _reference_chain(key, [words[:, index] for index in (3, 2, 1, 0)], _ROUNDS[1])
    return struct.pack("<QQQ", int(first.sum(dtype=np.uint64)), int(second.sum(dtype=np.uint64)), size_bytes)


def _reference_chain(
    key: numpy.ndarray[Any, Any], words: list[numpy.ndarray[Any, Any]], multipliers: Sequence[int]
) -> numpy.ndarray[Any, Any]:
    import numpy as np

    state = words[0] ^ key
    for index, multiplier in enumerate(multipliers):
        if 0 < index < len(words):
            state = state + words[index]
        state = (state ^ (state >> np.uint64(32))) * np.uint64(multiplier)
    folded: numpy.ndarray[Any, Any] = state ^ (state >> np.uint64(32))
    return folded
