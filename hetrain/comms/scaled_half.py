"""Gradients and parameters in 16 bits a value: a power of two for the whole message, then the values.

float16 has 11 significant bits in a narrow range. Every message is scaled so that its largest value comes to lie just
below that range's end: none is clipped, and values down to 2^-29 of the largest keep all their bits. Gradients of a
mean over a large batch would lose theirs unscaled (below 6e-5), which matters to optimizers that divide by their size.
bfloat16 has 8 significant bits and float32's range, and is not scaled.
"""

import math

import torch
from torch import Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
HEAD = 4  # bytes: the exponent, int32
_TOP = 15  # the largest scaled value is at least 2^14 and below 2^15; float16 ends at 65504
_LEAST = -100  # exponents below are taken as this one: float32 has no scale for them


def nbytes(values: int) -> int:
    """Bytes of a message of so many values; a multiple of 4."""
    return HEAD + 4 * -(-values // 2)


def encode(values: Tensor, name: str) -> Tensor:
    """float32 [n] as uint8 [nbytes(n)] on its device; `name`: fp16 or bf16."""
    exponent = _exponent(values) if name == "fp16" else _TOP
    message = torch.zeros(nbytes(len(values)), dtype=torch.uint8, device=values.device)
    message[:HEAD].view(torch.int32).fill_(exponent)
    scaled = values if exponent == _TOP else values * math.ldexp(1.0, _TOP - exponent)
    message[HEAD:].view(DTYPES[name])[: len(values)].copy_(scaled)
    return message


def decode(message: Tensor, values: int, name: str) -> Tensor:
    """The `values` that `encode` was given, rounded: float32 [values]."""
    exponent = int(message[:HEAD].view(torch.int32))
    found = message[HEAD:].view(DTYPES[name])[:values].float()
    return found if exponent == _TOP else found.mul_(math.ldexp(1.0, exponent - _TOP))


def _exponent(values: Tensor) -> int:
    """The largest magnitude is below 2^exponent; values that are not finite stay so, unscaled."""
    if not len(values):
        return _LEAST
    largest = float(torch.maximum(-values.amin(), values.amax()))  # 0.6 of aminmax's time, a thirtieth of vector_norm's
    return max(math.frexp(largest)[1], _LEAST) if math.isfinite(largest) else _TOP
