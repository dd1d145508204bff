"""Random values of any message type, from its own annotations: a new message or field is covered as it is added."""

from __future__ import annotations

import random
from typing import Any

from msgspec import inspect

__all__ = ["random_message"]

_TEXT = "abcß\N{SNOWMAN}\N{PILE OF POO}\x00\n\"'\\"


def random_message(message_type: type, rng: random.Random) -> Any:
    """A valid value of a msgspec struct type."""
    return _value(inspect.type_info(message_type), rng)


def _value(kind: inspect.Type, rng: random.Random) -> Any:
    match kind:
        case inspect.StructType():
            given = {
                field.name: _value(field.type, rng) for field in kind.fields if field.required or rng.random() < 0.7
            }
            return kind.cls(**given)
        case inspect.UnionType():
            return _value(rng.choice(kind.types), rng)
        case inspect.NoneType():
            return None
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.IntType():
            return rng.choice([0, 1, -1, rng.randrange(-(1 << 63), 1 << 63), (1 << 64) - 1])
        case inspect.FloatType():
            return rng.choice([0.0, -1.5, 1e300, rng.random()])
        case inspect.StrType():
            return "".join(rng.choices(_TEXT, k=rng.randrange(20)))
        case inspect.EnumType():
            return rng.choice(list(kind.cls))
        case inspect.VarTupleType():
            return tuple(_value(kind.item_type, rng) for _ in range(rng.randrange(4)))
        case inspect.TupleType():
            return tuple(_value(item, rng) for item in kind.item_types)
        case inspect.DictType():
            return {_value(kind.key_type, rng): _value(kind.value_type, rng) for _ in range(rng.randrange(4))}
        case _:
            raise NotImplementedError(f"no random value of {kind}; add it here")
