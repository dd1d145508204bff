"""PURE. The allocator tags: what sleeps as one, and what becomes of it."""

from __future__ import annotations

__all__ = ["ALL_TAGS", "BACKED_UP", "KV_CACHE", "WEIGHTS"]

WEIGHTS = "weights"
KV_CACHE = "kv_cache"

#: Tags a caller may name, in the order in which they are woken.
ALL_TAGS: tuple[str, ...] = (WEIGHTS, KV_CACHE)

#: Tags whose bytes level-1 sleep keeps in host memory; the contents of the others are dropped.
BACKED_UP: frozenset[str] = frozenset({WEIGHTS})
