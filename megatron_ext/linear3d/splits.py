"""What a grid can split: every size that it cannot, with the nearest that it could. Pure."""

from dataclasses import dataclass
from math import lcm

from megatron_ext.linear3d.grid import Grid3D
from megatron_ext.linear3d.sizes import ModelSizes, VocabMode
from megatron_ext.rules_sizes import multiples_near


@dataclass(frozen=True)
class Unsplit:
    """A size that is not a multiple of what the grid needs."""

    option: str
    value: int
    step: int
    why: str

    def text(self, grid: Grid3D) -> str:
        """The problem for a user."""
        gi, gj, gl = grid.sizes
        return (
            f"--linear-3d {gi} {gj} {gl} (axes i {gi}, j {gj}, l {gl}) cannot split {self.option} "
            f"{self.value}: {self.why}, so it must be a multiple of {self.step}. Set {self.option} to "
            f"{multiples_near(self.value, self.step)}, or choose another grid (megatron-ext plan linear3d "
            "lists those that fit)."
        )


def unsplit(sizes: ModelSizes, grid: Grid3D, vocab: VocabMode = "plane") -> list[Unsplit]:
    """All sizes that the grid cannot split; sizes of 0 are not known yet and pass."""
    gi, gj, gl = grid.sizes
    seq = grid.ranks if vocab == "stages" else lcm(gj, gl)
    over = (
        "all ranks, for the vocabulary layers of --vocab-parallel," if vocab == "stages" else "j and over l"
    )
    found = [
        Unsplit("--micro-batch-size", sizes.batch, gi, "sequences are cut over i"),
        Unsplit("--seq-length", sizes.seq, seq, f"the sequence is cut over {over}"),
        Unsplit(
            "--hidden-size",
            sizes.hidden,
            lcm(gl * gi, gl),
            "features are cut over l, and rows of weights over l and i",
        ),
        Unsplit(
            "--num-query-groups" if sizes.kv_groups != sizes.heads else "--num-attention-heads",
            sizes.kv_groups,
            gj * gl,
            "attention heads are cut over j and l in whole key/value groups",
        ),
        Unsplit(
            "--ffn-hidden-size",
            sizes.ffn,
            gj * gi,
            "features inside the MLP are cut over j, and rows of its weight over j and i",
        ),
    ]
    rows = sizes.qkv
    if sizes.kv_groups % (gj * gl) == 0 and rows % (gj * gi):
        why = f"the {rows} rows of the QKV weight (all its heads) are cut over j and i"
        found.append(Unsplit("--kv-channels", sizes.head_dim, _channels(sizes, gj * gi), why))
    return [u for u in found if u.value % u.step]


def _channels(sizes: ModelSizes, parts: int) -> int:
    """The step of head sizes that makes the QKV rows a multiple of `parts`."""
    heads = sizes.heads + 2 * sizes.kv_groups
    return next(step for step in range(1, parts + 1) if heads * step % parts == 0)


def fits(sizes: ModelSizes, grid: Grid3D, vocab: VocabMode = "plane") -> bool:
    """Whether the grid splits the model."""
    return not unsplit(sizes, grid, vocab)
