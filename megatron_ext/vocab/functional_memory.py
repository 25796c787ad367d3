"""Bytes of the output passes of one microbatch on one shard, as formulas.

n tokens, R = V_r rows of the shard, h hidden, i bytes per number in the model's type, s in statistics.
Counted are matrices, labels and statistics; other vectors [n] or [h] are left out, and so are weights and
gradient buffers. Several microbatches may lie between S and T: each adds what it keeps.
"""

from typing import Literal

from megatron_ext.vocab.saving import Saving

Algorithm = Literal["naive", "vocab-1", "vocab-2", "interlaced"]


def kept_bytes(
    n: int,
    rows: int,
    hidden: int,
    itemsize: int,
    saving: Saving,
    algorithm: Algorithm,
    *,
    num_statistics: int = 3,
) -> int:
    """Bytes that a microbatch keeps from S to T: X, labels, statistics, what `saving` says; vocab-2 also A_r.

        i n h + 8 n + k s n   + s n R (softmax) or i n R (logits)   + s n h (vocab-2, until its barrier ends)

    k = `num_statistics` of `LossTerms`. In the naive grouping, fp32 exponentials exist from U on.
    """
    s = _statistics_size(itemsize)
    per_row = {"softmax": s, "logits": itemsize, "none": 0}[saving.mode]
    softmax_x = s * n * hidden if algorithm == "vocab-2" else 0
    return _base(n, hidden, itemsize, num_statistics) + per_row * n * rows + softmax_x


def peak_bytes(
    n: int,
    rows: int,
    hidden: int,
    itemsize: int,
    saving: Saving,
    algorithm: Algorithm,
    *,
    num_statistics: int = 3,
    weight_product: bool = False,
) -> int:
    """Most bytes at any time in S, U, `input_gradient_part` and T of one microbatch, what it keeps included.

    `weight_product`: the weight gradient is a tensor of its own before it is added, as with fp32 main_grad
    and a 16-bit model without Apex's fused kernel.
    """
    in_s = algorithm == "vocab-2"
    measure = {"softmax": _softmax, "logits": _logits, "none": _chunks}[saving.mode]
    moments = measure(n, rows, hidden, itemsize, saving, in_s, weight_product)
    return _base(n, hidden, itemsize, num_statistics) + max(moments)


def _statistics_size(itemsize: int) -> int:
    return max(itemsize, 4)


def _base(n: int, hidden: int, itemsize: int, num_statistics: int) -> int:
    return itemsize * n * hidden + 8 * n + num_statistics * _statistics_size(itemsize) * n


def _product(n: int, hidden: int, itemsize: int) -> int:
    """Bytes of a product [n, h] in fp32 while it is computed in the model's type."""
    s = _statistics_size(itemsize)
    return s * n * hidden + (itemsize * n * hidden if itemsize != s else 0)


def _softmax_product(n: int, columns: int, hidden: int, itemsize: int) -> int:
    """Bytes while softmax_times_weight works on [n, columns]."""
    product = _product(n, hidden, itemsize)
    if itemsize == _statistics_size(itemsize):
        return product
    return max(product, itemsize * n * (columns + hidden))


def _softmax(
    n: int, rows: int, h: int, i: int, saving: Saving, in_s: bool, weight_product: bool
) -> list[int]:
    s = _statistics_size(i)
    cast = (s + i if i != s else s) * n * rows  # logits to fp32 in S, gradient to the model's type in T
    moments = [cast, i * n * rows + (i * rows * h if weight_product else 0)]
    if in_s:
        moments.append(s * n * (rows + h) + _softmax_product(n, rows, h, i))
    else:
        moments.append(i * n * rows + _product(n, h, i))
    return moments


def _logits(n: int, rows: int, h: int, i: int, saving: Saving, in_s: bool, weight_product: bool) -> list[int]:
    s = _statistics_size(i)
    tokens, kept = saving.tokens_at_a_time(n, rows), i * n * rows
    softmax_x = s * n * h if in_s else 0
    moments = [kept + softmax_x + s * tokens * rows, kept + (i * rows * h if weight_product else 0)]
    if in_s:
        moments.append(kept + softmax_x + s * tokens * rows + _softmax_product(tokens, rows, h, i))
        moments.append(kept + softmax_x + _product(n, h, i))  # the rows of the labels, for D_r
    else:
        moments.append(kept + _product(n, h, i))
    return moments


def _chunks(n: int, rows: int, h: int, i: int, saving: Saving, in_s: bool, weight_product: bool) -> list[int]:
    s = _statistics_size(i)
    columns = saving.rows_at_a_time(rows)
    running = s * n * h  # A_r in S or dX in T
    cast = (s + i if i != s else s) * n * columns
    product = i * columns * h if weight_product else 0
    moments = [running + cast]
    if in_s:
        moments.append(running + s * n * columns + _softmax_product(n, columns, h, i))
        moments.append(i * n * columns + product)
    else:
        moments.append(running + i * n * columns + max(product, _product(n, h, i)))
    return moments
