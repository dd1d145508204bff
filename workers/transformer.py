"""The example worker: a small tensor-parallel decoder with captured graphs, one code for CUDA and the software device.

Knows a model and nothing of devices: memory comes from ``context.allocator``, graphs from ``context.capture`` and sums
from ``context.communicator``. What it shows to those who write their own worker:

- weights and KV cache live in tagged memory at fixed addresses, and so do the graphs' inputs;
- a captured function takes no arguments and depends on tensors only, so that one graph serves every step;
- nothing is done to survive a sleep, except not to count on the KV cache's contents afterwards.

Weights are random. Each full weight is made on the host from the seed and its own name and then cut for the rank, so
the model is the same for every number of ranks (up to the order of float sums).
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from checkpoint_executor.tags import KV_CACHE, WEIGHTS
from checkpoint_executor.workers.protocols import Communicator, Graph
from checkpoint_executor.workers.worker import Worker, WorkerContext, execution

__all__ = ["TransformerConfig", "TransformerWorker"]


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of the model.

    Attributes:
        vocab, hidden, intermediate: sizes. layers, heads, kv_heads: numbers; ``kv_heads`` divides ``heads``.
        max_seq_len: prompt and answer together, tokens. batch_sizes: one graph is captured for each.
        seed: of the weights. dtype: name of a floating torch type; norms, softmax and logits are float32.

    ``heads``, ``kv_heads``, ``intermediate`` and ``vocab`` are multiples of the number of ranks.
    """

    vocab: int = 512
    hidden: int = 128
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 256
    max_seq_len: int = 128
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.hidden % self.heads or self.head_dim % 2:
            raise ValueError("kv_heads must divide heads, heads must divide hidden, and the head size must be even")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must hold positive numbers, got {self.batch_sizes}")

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"{self.dtype!r} is not a floating type of torch")
        return dtype


class RMSNorm(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Column-parallel q, k and v, row-parallel o.

    ``cache`` is keys and values: ``[2, largest batch, kv heads of this rank, max_seq_len, head_dim]``.
    """

    def __init__(self, config: TransformerConfig, ranks: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads // ranks, config.kv_heads // ranks, config.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = nn.Linear(config.hidden, rows, bias=False, dtype=config.torch_dtype)
        self.o = nn.Linear(self.heads * self.head_dim, config.hidden, bias=False, dtype=config.torch_dtype)

    def forward(self, x: torch.Tensor, step: Step, cache: torch.Tensor) -> torch.Tensor:
        batch, size = x.shape[0], self.head_dim
        q, k, v = self.qkv(x).split([self.heads * size, self.kv_heads * size, self.kv_heads * size], dim=-1)
        q = step.rotate(q.reshape(batch, self.heads, size))
        k = step.rotate(k.reshape(batch, self.kv_heads, size))
        v = v.reshape(batch, self.kv_heads, size)

        keys, values = cache[0, :batch], cache[1, :batch]
        at = step.positions.view(batch, 1, 1, 1).expand(batch, self.kv_heads, 1, size)
        keys.scatter_(2, at, k.unsqueeze(2))
        values.scatter_(2, at, v.unsqueeze(2))

        # Over all of max_seq_len with a mask, because a graph's shapes cannot follow the position.
        q = q.view(batch, self.kv_heads, self.heads // self.kv_heads, size)
        scores = torch.matmul(q, keys.transpose(2, 3)).float() / math.sqrt(size)
        weights = scores.masked_fill(step.future, -math.inf).softmax(-1).to(x.dtype)
        return step.communicator.all_reduce(self.o(torch.matmul(weights, values).reshape(batch, self.heads * size)))


class FeedForward(nn.Module):
    """Column-parallel gate and up, row-parallel down."""

    def __init__(self, config: TransformerConfig, ranks: int) -> None:
        super().__init__()
        own = config.intermediate // ranks
        self.gate_up = nn.Linear(config.hidden, 2 * own, bias=False, dtype=config.torch_dtype)
        self.down = nn.Linear(own, config.hidden, bias=False, dtype=config.torch_dtype)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return step.communicator.all_reduce(self.down(nn.functional.silu(gate) * up))


class Layer(nn.Module):
    def __init__(self, config: TransformerConfig, ranks: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.torch_dtype)
        self.attention = Attention(config, ranks)
        self.feed_forward_norm = RMSNorm(config.hidden, config.torch_dtype)
        self.feed_forward = FeedForward(config, ranks)

    def forward(self, x: torch.Tensor, step: Step, cache: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), step, cache)
        x = x + self.feed_forward(self.feed_forward_norm(x), step)
        return x


class Transformer(nn.Module):
    """One token of each sequence in, the logits of the next out.

    ``cos`` and ``sin`` are ``[max_seq_len, head_dim / 2]``, ``slots`` counts the places of the cache; all three are
    buffers so that they sleep with the weights.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor

    def __init__(self, config: TransformerConfig, ranks: int) -> None:
        super().__init__()
        # No nn.Embedding: it fills itself with normal_, which on the meta device imports all of torch._dynamo (1.5 s).
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.hidden, dtype=config.torch_dtype))
        # Beside the rotary embedding, because random weights otherwise have tokens that follow themselves for ever:
        # when all of the context is one token, attention gives the same whatever the position.
        self.places = nn.Parameter(torch.empty(config.max_seq_len, config.hidden, dtype=config.torch_dtype))
        self.layers = nn.ModuleList(Layer(config, ranks) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.torch_dtype)
        self.lm_head = nn.Linear(config.hidden, config.vocab // ranks, bias=False, dtype=config.torch_dtype)
        self.register_buffer("cos", torch.empty(config.max_seq_len, config.head_dim // 2))
        self.register_buffer("sin", torch.empty(config.max_seq_len, config.head_dim // 2))
        self.register_buffer("slots", torch.empty(config.max_seq_len, dtype=torch.int64))

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, communicator: Communicator
    ) -> torch.Tensor:
        """tokens, positions: int64 ``[batch]``. Returns float32 ``[batch, vocab]``, all of it on every rank."""
        step = Step(self, positions, communicator)
        x = self.embedding.index_select(0, tokens) + self.places.index_select(0, positions)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, step, layer_cache)
        logits: torch.Tensor = self.lm_head(self.norm(x)).float()
        return communicator.all_gather(logits).transpose(0, 1).reshape(tokens.shape[0], -1)


class Step:
    """What all layers need to know of one decoding step."""

    def __init__(self, model: Transformer, positions: torch.Tensor, communicator: Communicator) -> None:
        self.positions = positions
        self.communicator = communicator
        self.cos = model.cos.index_select(0, positions).unsqueeze(1)
        self.sin = model.sin.index_select(0, positions).unsqueeze(1)
        #: ``[batch, 1, 1, max_seq_len]``: places of the cache that are not written yet.
        self.future = model.slots > positions.view(-1, 1, 1, 1)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of ``[batch, heads, head_dim]``."""
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(x.dtype)


class TransformerWorker(Worker):
    """One rank of the example model; builds weights, KV cache and graphs in its constructor.

    Args:
        context: the rank's place and device.
        config: the model. None: the defaults.
        fields: fields of the config by name, for callers that do not want to import torch.

    Raises:
        ValueError: the model cannot be cut for this number of ranks. MemoryError: it does not fit.
    """

    def __init__(self, context: WorkerContext, config: TransformerConfig | None = None, **fields: Any) -> None:
        super().__init__(context)
        self.config = replace(config or TransformerConfig(), **fields)
        _check_partition(self.config, context.world_size)
        with torch.device("meta"):
            model = Transformer(self.config, context.world_size)
        self._model = context.allocator.materialize(model, WEIGHTS).requires_grad_(False)
        self.load_weights(self.config.seed)

        rows = max(self.config.batch_sizes)
        shape = (self.config.layers, 2, rows, self.config.kv_heads // context.world_size)
        self._cache = self._new((*shape, self.config.max_seq_len, self.config.head_dim), self.config.torch_dtype)
        # The graphs' inputs are written before every replay, so their contents need not survive a sleep either.
        self._tokens = self._new((rows,), torch.int64)
        self._positions = self._new((rows,), torch.int64)
        self._forget()
        self._graphs: dict[int, Graph[tuple[torch.Tensor, torch.Tensor]]] = {
            batch: self._capture(batch) for batch in sorted(set(self.config.batch_sizes), reverse=True)
        }

    @execution
    def decode(self, prompts: list[list[int]], max_new_tokens: int) -> dict[str, Any]:
        """Greedy decoding; prompts are fed token by token through the same graphs.

        Returns:
            ``tokens``: ``max_new_tokens`` for each prompt. ``logits_sha256``: over the bits of all logits of all steps.
            ``distinct_tokens``: how many different tokens there are among ``tokens``.

        Raises:
            ValueError: an empty prompt, an unknown token, or more than ``max_seq_len`` tokens.
        """
        self._check_prompts(prompts, max_new_tokens)
        digest = hashlib.sha256()
        tokens: list[list[int]] = []
        largest = max(self.config.batch_sizes)
        for start in range(0, len(prompts), largest):
            tokens += self._decode_batch(prompts[start : start + largest], max_new_tokens, digest)
        return {
            "tokens": tokens,
            "logits_sha256": digest.hexdigest(),
            "distinct_tokens": len({token for answer in tokens for token in answer}),
        }

    def weight_checksums(self) -> dict[str, str]:
        """SHA-256 of every weight of this rank, by name."""
        return {name: hashlib.sha256(_bytes_of(weight)).hexdigest() for name, weight in self._named_weights()}

    @torch.no_grad()
    def load_weights(self, seed: int) -> None:
        """Overwrite all weights, in place, with the random ones of this seed: what a trainer's new policy would be."""
        for name, weight in self._model.named_parameters():
            weight.copy_(self._shard(name, seed))
        half = self.config.head_dim // 2
        frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(self.config.max_seq_len, dtype=torch.float32), frequencies)
        self._model.cos.copy_(angles.cos())
        self._model.sin.copy_(angles.sin())
        self._model.slots.copy_(torch.arange(self.config.max_seq_len))

    @torch.no_grad()
    def scale_weights(self, factor: float) -> None:
        """Multiply all weights by ``factor``, in place."""
        for weight in self._model.parameters():
            weight.mul_(factor)

    def addresses(self) -> dict[str, int]:
        """Address of everything that a graph was captured with, by name."""
        found = {f"weights.{name}": weight.data_ptr() for name, weight in self._named_weights()}
        found |= {"kv_cache": self._cache.data_ptr()}
        found |= {"input.tokens": self._tokens.data_ptr(), "input.positions": self._positions.data_ptr()}
        for batch, graph in self._graphs.items():
            logits, following = graph.output
            found |= {f"graph{batch}.logits": logits.data_ptr(), f"graph{batch}.next": following.data_ptr()}
        return found

    def memory(self) -> dict[str, int]:
        """Device bytes of this rank by tag, and those of the communicator."""
        communicator = self.context.communicator.memory_bytes()
        return self.context.allocator.tag_bytes() | {f"communicator_{key}": n for key, n in communicator.items()}

    # Decoding

    def _capture(self, batch: int) -> Graph[tuple[torch.Tensor, torch.Tensor]]:
        tokens, positions = self._tokens[:batch], self._positions[:batch]

        @torch.no_grad()
        def step() -> tuple[torch.Tensor, torch.Tensor]:
            logits = self._model(tokens, positions, self._cache, self.context.communicator)
            return logits, logits.argmax(-1)

        return self.context.capture(step)

    def _decode_batch(self, prompts: list[list[int]], max_new_tokens: int, digest: hashlib._Hash) -> list[list[int]]:
        self._forget()
        rows = len(prompts)
        graph = self._graphs[min(batch for batch in self._graphs if batch >= rows)]
        sequences = [list(prompt) for prompt in prompts]
        wanted = [len(prompt) + max_new_tokens for prompt in prompts]
        for position in range(max(wanted) - 1):
            # A finished sequence repeats its last step, which writes the same bytes to the same place of the cache.
            at = [min(position, end - 2) for end in wanted]
            self._tokens[:rows].copy_(torch.tensor([sequences[row][at[row]] for row in range(rows)]))
            self._positions[:rows].copy_(torch.tensor(at))
            logits, following = graph.replay()
            digest.update(_bytes_of(logits[:rows]))
            for row, token in enumerate(following[:rows].tolist()):
                if len(sequences[row]) == at[row] + 1 and len(sequences[row]) < wanted[row]:
                    sequences[row].append(token)
        return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]

    def _forget(self) -> None:
        """Start anew. Zeros matter: undefined bytes may be NaN, and a masked weight of 0 times NaN is NaN."""
        self._cache.zero_()
        self._tokens.zero_()
        self._positions.zero_()

    def _check_prompts(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be positive, got {max_new_tokens}")
        for prompt in prompts:
            if not prompt or not all(0 <= token < self.config.vocab for token in prompt):
                raise ValueError(f"a prompt must hold tokens below {self.config.vocab}, got {prompt}")
            if len(prompt) + max_new_tokens > self.config.max_seq_len:
                raise ValueError(
                    f"{len(prompt)} + {max_new_tokens} tokens are more than max_seq_len={self.config.max_seq_len}"
                )

    # Weights

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.context.allocator.empty(shape, dtype, KV_CACHE)

    def _named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()

    def _shard(self, name: str, seed: int) -> torch.Tensor:
        """This rank's part of a weight, float32 on the host."""
        config, rank, ranks = self.config, self.context.rank, self.context.world_size

        def full(part: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
            key = hashlib.sha256(f"{seed}/{part}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
            return torch.randn(shape, generator=generator) * scale

        def columns(part: str, rows: int, scale: float = 1.0) -> torch.Tensor:
            return full(part, rows, config.hidden, scale=scale / math.sqrt(config.hidden)).chunk(ranks)[rank]

        def rows(part: str, inputs: int) -> torch.Tensor:
            return full(part, config.hidden, inputs, scale=1 / math.sqrt(inputs)).chunk(ranks, dim=1)[rank]

        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind.endswith("norm"):
            return torch.ones(config.hidden)
        if kind == "embedding":
            return full(name, config.vocab, config.hidden)
        if kind == "places":
            return full(name, config.max_seq_len, config.hidden)
        if kind == "lm_head":
            return columns(name, config.vocab, scale=4.0)
        if kind == "qkv":
            sizes = {"q": config.heads, "k": config.kv_heads, "v": config.kv_heads}
            # Sharp attention: the next token depends on the whole context, and greedy decoding does not go in circles.
            scales = {"q": 2.0, "k": 2.0, "v": 1.0}
            return torch.cat([columns(f"{name}/{p}", n * config.head_dim, scales[p]) for p, n in sizes.items()])
        if kind == "gate_up":
            return torch.cat([columns(f"{name}/{p}", config.intermediate) for p in ("gate", "up")])
        if kind == "o":
            return rows(name, config.hidden)
        if kind == "down":
            return rows(name, config.intermediate)
        raise ValueError(f"no rule to make the weight {name}")


def _check_partition(config: TransformerConfig, ranks: int) -> None:
    sizes = {
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "intermediate": config.intermediate,
        "vocab": config.vocab,
    }
    uneven = [f"{name}={size}" for name, size in sizes.items() if size % ranks]
    if uneven:
        raise ValueError(f"{', '.join(uneven)} cannot be divided among {ranks} ranks")


def _bytes_of(tensor: torch.Tensor) -> bytes:
    host = tensor.detach().cpu().contiguous()
    return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size())
