"""Packed sequences of Megatron as layouts, read from the device once per microbatch, not once per layer."""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_ext.wallfacer.sequence import Layout, packed

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

REMEMBERED = 64
"""Microbatches whose layouts are kept: more than a pipeline has in flight."""

Sources = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class _Read:
    """What was read, the tensors that it was read from, their versions then, and the layers that used it."""

    layout: Layout
    sources: Sources
    versions: tuple[int, ...]
    users: set[int] = field(default_factory=set)

    def serves(self, sources: Sources, user: int) -> bool:
        """Whether it is what `user` would read now.

        The tensors are held, so no other one can have their address; what torch writes into them raises
        their versions. Writes behind torch's back (`.data`, buffers of NumPy) are those of another
        microbatch, in which a layer asks again, and nothing is served twice to one layer.
        """
        same = all(a is b for a, b in zip(self.sources, sources, strict=True))
        return same and self.versions == _versions(sources) and user not in self.users


class PackedLayouts:
    """Layouts of the microbatches in flight."""

    def __init__(self) -> None:
        self._known: deque[_Read] = deque(maxlen=REMEMBERED)

    def get(self, params: "PackedSeqParams", user: object) -> Layout:
        """The layout of `params` as they are now, for a layer.

        Raises:
            ValueError: see `layout_of`.
        """
        sources = _sources(params)
        if any(x is not None and x.is_inference() for x in sources):
            return layout_of(params)  # torch does not count what is written into them
        _check(params)
        found = next((read for read in self._known if read.serves(sources, id(user))), None)
        if found is None:
            stale = [r for r in self._known if all(a is b for a, b in zip(r.sources, sources, strict=True))]
            for read in stale:
                self._known.remove(read)
            found = _Read(layout_of(params), sources, _versions(sources))
            self._known.append(found)
        found.users.add(id(user))
        return found.layout


def layout_of(params: "PackedSeqParams") -> Layout:
    """Documents of Megatron's packed sequences, each of which is dealt out by itself.

    Raises:
        ValueError: a format other than thd, queries and keys of other lengths, or ranks of its own.
    """
    _check(params)
    filled_q, filled_kv, padded_q, padded_kv = _sources(params)
    query, keys = _ends(padded_q, filled_q), _ends(padded_kv, filled_kv)
    if query != keys:
        raise ValueError(
            "packed sequences whose queries and keys have other lengths: WallFacer wants one set"
        )
    return packed(*query)


def _check(params: "PackedSeqParams") -> None:
    if params.qkv_format != "thd":
        raise ValueError(f"packed sequences in the format {params.qkv_format!r}: WallFacer reads thd alone")
    if params.local_cp_size is not None or params.cp_group is not None:
        raise ValueError(
            "packed sequences that name context-parallel ranks of their own (dynamic context parallelism): "
            "WallFacer's teams are made of all of them. Use another --cp-comm-type"
        )


def _sources(params: "PackedSeqParams") -> Sources:
    return (
        params.cu_seqlens_q,
        params.cu_seqlens_kv,
        params.cu_seqlens_q_padded,
        params.cu_seqlens_kv_padded,
    )


def _versions(sources: Sources) -> tuple[int, ...]:
    return tuple(-1 if x is None else x._version for x in sources)


def _ends(padded: Tensor | None, filled: Tensor) -> tuple[list[int], list[int]]:
    """Ends of documents with and without padding; what collated batches are filled up with is left out."""
    rows = list(zip((filled if padded is None else padded).tolist(), filled.tolist(), strict=True))
    while len(rows) > 2 and rows[-1] == rows[-2]:
        rows.pop()
    with_padding, without = zip(*rows, strict=True)
    return list(with_padding), list(without)
