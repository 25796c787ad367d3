"""Bytes of weights and of what passes keep, layer by layer, on one rank; pure.

n tokens of a microbatch, r = n, or n / t with sequence parallelism, h hidden, f ffn, q = heads x head size,
k = query groups x head size, e bytes per number; a tensor-parallel rank has 1/t of q, k and f. For each
layer and microbatch, flash attention and fused kernels keep

    2 norms          input and output: 4 e r h, and statistics
    attention        e n (q + 2 k), the result e n q, log-sum-exp 4 n heads
    MLP              before and after the activation: 2 e n f, gated 3 e n f
    dropout masks    2 r h where there is dropout

which for f = 4h, q = k = h is 32 nh in 16 bits, 34 with dropout: the 34 sbh of Korthikanti et al., arXiv
2205.05198 (section 4.1, without the attention core). Torch's own operations keep more; each term says so.
"""

from megatron_ext.vocab.memory_description import Description
from megatron_ext.vocab.shard import vocab_range

STATISTIC = 4  # bytes: norms and flash attention keep theirs in fp32
TOKEN = 8  # bytes of an int64 token


def layer_params(d: Description) -> int:
    """Weights of one transformer layer."""
    q, k, f = _widths(d)
    up = f * (2 if d.gated else 1)
    matrices = d.hidden * (2 * q + 2 * k + up + f)
    biases = (q + 2 * k if d.bias or d.qkv_bias else 0) + (d.hidden + up + d.hidden if d.bias else 0)
    return matrices + biases + 2 * norm_params(d)


def norm_params(d: Description) -> int:
    """Weights of one norm."""
    return d.hidden * (2 if d.norm == "LayerNorm" else 1)


def params(d: Description, rank: int) -> int:
    """Weights of a pipeline rank, on each of its tensor-parallel ranks."""
    total = d.stage_layers[rank] * layer_params(d)
    first, last = rank == d.place.first.rank, rank == d.place.last.rank
    if first:
        total += d.positions * d.hidden
    if last:
        total += norm_params(d)
    if d.vocab_mode != "off":
        return total + shard_rows_of(d, rank) * d.hidden * (1 if d.tied else 2)
    table = d.vocab // d.tensor * d.hidden
    if first:
        total += table
    # Tied, the last stage holds a copy, unless it is on the rank of the first one, too.
    if last and not (first and d.tied):
        total += table
    return total


def shard_rows_of(d: Description, rank: int) -> int:
    """Vocabulary rows of a rank under vocabulary parallelism."""
    lo, hi = vocab_range(d.vocab, d.tensor, 0, d.pipeline, rank)
    return hi - lo


def layer_kept(d: Description) -> int:
    """Bytes that a transformer layer keeps for its backward pass, without recomputation."""
    norms = 2 * (norm_kept(d) + d.itemsize * d.residual_rows * d.hidden)
    dropouts = 2 * d.dropout_mask * d.residual_rows * d.hidden
    return norms + attention_kept(d) + scores_kept(d) + mlp_kept(d) + dropouts


def norm_kept(d: Description) -> int:
    """A norm's input and statistics; the output is the next layer's to keep."""
    rows = d.residual_rows
    statistics = rows * STATISTIC * (2 if d.norm == "LayerNorm" else 1)
    if d.norm == "RMSNorm" and not d.fused:
        # Input and normalised input, both in fp32; only of the latter there is one in fp32 models.
        return 2 * 4 * rows * d.hidden + statistics
    return d.itemsize * rows * d.hidden + statistics


def attention_kept(d: Description) -> int:
    """Queries, keys, values and the result; the part that selective recomputation keeps, too."""
    q, k, _ = _widths(d)
    # Values are a view into the projection, which so stays alive beside rotated queries and keys.
    rotated = q + k if d.rope and not d.flash else 0
    tables = 4 * d.head_dim * d.seq_length if d.rope and not d.fused else 0
    return d.itemsize * (d.tokens * (q + 2 * k + rotated + q) + tables)


def scores_kept(d: Description) -> int:
    """What selective recomputation of the attention core does without."""
    heads, q, k = d.heads // d.tensor, *_widths(d)[:2]
    if d.flash:
        return STATISTIC * d.tokens * heads
    scores = d.tokens * d.seq_length * heads
    softmax = d.softmax_itemsize + d.itemsize if d.softmax_itemsize else d.itemsize
    dropout = d.attention_dropout_mask + d.itemsize if d.attention_dropout_mask else 0
    total = scores * (softmax + dropout)
    if q != k:
        # Keys and values are repeated for all heads, so copies take the place of the projection; the rotated
        # queries are there already.
        projected = q + 2 * k + (q + k if d.rope else 0)
        total += d.itemsize * d.tokens * (3 * q - projected)
    # Without a mask from the data loader each layer makes its own.
    return total if d.attention_mask else total + d.seq_length**2


def mlp_kept(d: Description) -> int:
    """Before and after the activation; a gated one without fusion keeps silu(x) and the shifted gate, too."""
    f = _widths(d)[2]
    widths = 2 if not d.gated else (3 if d.fused else 5)
    return d.itemsize * d.tokens * widths * f


def mlp_modules_kept(d: Description) -> int:
    """What a layer keeps with the modules of `recompute_modules` recomputed."""
    kept = layer_kept(d)
    if "core_attn" in d.recompute_modules:
        kept -= scores_kept(d)
    if "mlp" in d.recompute_modules:
        kept -= mlp_kept(d)
    if "layernorm" in d.recompute_modules:
        kept -= 2 * d.itemsize * d.residual_rows * d.hidden
    return kept


def hidden_bytes(d: Description) -> int:
    """One tensor of hidden states as a layer takes and gives it."""
    return d.itemsize * d.residual_rows * d.hidden


def stage_kept(d: Description, rank: int, chunk: int = 0) -> int:
    """Bytes that one microbatch's forward pass leaves on a stage, without stock's output layer."""
    layers = d.chunk_layers(rank)
    kept = _layers_kept(d, layers)
    if d.place.first == (rank, chunk):
        kept += 2 * TOKEN * d.tokens + d.dropout_mask * d.residual_rows * d.hidden
    if d.place.last == (rank, chunk):
        # The final norm; what comes out is the output layer's input, which vocabulary passes keep themselves.
        kept += norm_kept(d) + (hidden_bytes(d) if d.vocab_mode == "off" else 0)
    if d.attention_mask and layers:
        kept += d.micro_batch * d.seq_length**2
    return kept


def left_for_weights(d: Description, layers: int) -> int:
    """Bytes that wait between B and W: every matrix's input and the gradient of its output."""
    q, k, f = _widths(d)
    up = f * (2 if d.gated else 1)
    inside = q + (q + 2 * k) + f + up  # of the parts of a tensor-parallel rank
    outside = 2 * d.residual_rows * d.hidden + 2 * d.tokens * d.hidden
    return layers * d.itemsize * (d.tokens * inside + outside)


def _layers_kept(d: Description, layers: int) -> int:
    if d.recompute == "selective":
        return layers * mlp_modules_kept(d)
    if d.recompute == "none":
        return layers * layer_kept(d)
    checkpoint = hidden_bytes(d)
    if d.distribute_saved and not d.sequence_parallel:
        checkpoint //= d.tensor
    if d.recompute_method == "block":
        recomputed = min(d.recompute_layers, layers)
        return recomputed * checkpoint + (layers - recomputed) * layer_kept(d)
    return -(-layers // d.recompute_layers) * checkpoint


def recomputed_bytes(d: Description, layers: int) -> int:
    """What a backward pass makes anew at a time, and so holds beside what was kept."""
    if not layers or d.recompute == "none":
        return 0
    if d.recompute == "selective":
        return layer_kept(d) - mlp_modules_kept(d)
    chunk = 1 if d.recompute_method == "block" else min(d.recompute_layers, layers)
    if d.recompute_method == "block" and d.recompute_layers < layers:
        return 0  # the last layers of the stage, which go first, were kept
    return chunk * layer_kept(d)


def backward_extra(d: Description, layers: int) -> int:
    """The most that a stage's backward pass holds beside what is kept: gradients, while nothing is freed yet.

    It starts at the last layer: the gradient of its output; then, for the MLP's second matrix, the gradients
    of its input and of its weight, which is a tensor before it is added to the buffer. What later parts need
    takes the place of activations that are freed by then; of these only attention scores can be larger.
    """
    if not layers:
        return 2 * hidden_bytes(d)
    _, _, f = _widths(d)
    e, n = d.itemsize, d.tokens
    second = e * n * f + e * f * d.hidden
    up = f * (2 if d.gated else 1)
    first = e * up * d.hidden + e * n * (up + d.hidden) - mlp_kept(d)
    moments = [second, first]
    if not d.flash:
        scores = n * d.seq_length * (d.heads // d.tensor)
        item = max(d.softmax_itemsize, e)
        moments.append(2 * item * scores - mlp_kept(d) - norm_kept(d))
    return hidden_bytes(d) + gathered_bytes(d) + max(0, *moments)


def gathered_bytes(d: Description) -> int:
    """With sequence parallelism: a matrix's whole input, gathered again, and its gradient, not yet cut."""
    return 2 * d.itemsize * d.tokens * d.hidden if d.sequence_parallel and d.tensor > 1 else 0


def _widths(d: Description) -> tuple[int, int, int]:
    """q, k and f of one tensor-parallel rank."""
    groups = max(1, d.query_groups // d.tensor)
    return d.heads * d.head_dim // d.tensor, groups * d.head_dim, d.ffn // d.tensor
