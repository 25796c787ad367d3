"""SentencePiece: train a model that loses nothing, check one, encode with it.

Everything here runs without torch; `train` and `encode` are called in worker processes.
"""

import contextlib
import functools
import io
import re
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.tools.data_errors import DataError

if TYPE_CHECKING:
    import sentencepiece

# SentencePiece writes a space as U+2581, so that character would come back as a space. It is spelt with an
# escape, and the escape character itself with another, which makes the mapping one to one.
_ESCAPE = "\ue000"
_ESCAPED = {"\u2581": _ESCAPE + "0", _ESCAPE: _ESCAPE + "1"}
# Its BPE trainer keeps positions in a word as 16-bit numbers.
_MAX_LINE_CHARS = 4096
_SPECIAL_PIECES = 3 + 256  # <unk> <s> </s> and one per byte
_PROBE = "def f(x):\n\tif  x:\n\n        return '\u2581\u00e9\U0001f600'  \n"


class LineSample:
    """An evenly spread, bounded part of all lines; needs no total and no random numbers.

    Every `stride`-th line is kept. When the kept ones exceed `max_bytes`, every other one is dropped and the
    stride doubles.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.lines: list[str] = []
        self.num_bytes = 0
        self.stride = 1
        self._seen = 0

    def add(self, text: str) -> None:
        """Offer the lines of a document; very long lines count as several."""
        for line in text.split("\n"):
            for start in range(0, len(line), _MAX_LINE_CHARS):
                if self._seen % self.stride == 0:
                    self._keep(line[start : start + _MAX_LINE_CHARS])
                self._seen += 1

    def _keep(self, line: str) -> None:
        self.lines.append(line)
        self.num_bytes += len(line.encode())
        while self.num_bytes > self.max_bytes and len(self.lines) > 1:
            del self.lines[1::2]
            self.stride *= 2
            self.num_bytes = sum(len(kept.encode()) for kept in self.lines)


def train(lines: Sequence[str], vocab_size: int) -> bytes:
    """Train a BPE model with exactly `vocab_size` pieces; the same lines give the same bytes.

    Text decodes to exactly what was encoded: bytes stand in for rare characters, spaces are kept, newlines
    and tabs are byte pieces, nothing is normalised. Changes the working folder while it runs, so call it in
    a process of its own.

    Raises:
        DataError: `vocab_size` is not possible for these lines.
    """
    import sentencepiece

    model = io.BytesIO()
    # The names of the rule files become part of the model, hence relative ones.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        _write_rules("escape.tsv", _ESCAPED)
        _write_rules("unescape.tsv", {escaped: char for char, escaped in _ESCAPED.items()})
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                byte_fallback=True,
                character_coverage=0.9995,
                normalization_rule_tsv="escape.tsv",
                denormalization_rule_tsv="unescape.tsv",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                max_sentence_length=8 * _MAX_LINE_CHARS,
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise DataError(_explain(str(error), vocab_size)) from error
    return model.getvalue()


def _write_rules(path: str, rules: dict[str, str]) -> None:
    rows = ("\t".join(" ".join(f"{ord(char):X}" for char in side) for side in rule) for rule in rules.items())
    Path(path).write_text("\n".join(rows) + "\n")


def _explain(message: str, vocab_size: int) -> str:
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"--vocab-size {vocab_size} is too small for this input: {_SPECIAL_PIECES} special and byte "
            f"pieces and its frequent characters need at least {found[1]}."
        )
    if found := re.search(r"Vocabulary size too high .* <= (\d+)", message):
        return (
            f"--vocab-size {vocab_size} is too large for this input: the largest possible is {found[1]}. "
            "Give that or less, give more text, or let training see more of it with --train-megabytes."
        )
    if "sentences_.empty()" in message:
        return "the input has no line to train a tokenizer on; give more text, or a --tokenizer-model."
    return f"SentencePiece cannot train a model of {vocab_size} pieces on this input: {message}"


@dataclass(frozen=True)
class Model:
    """What is known of a SentencePiece model: its path, number of pieces, end-of-document id.

    `eod` is what Megatron's tokenizer calls eod: the id of </s>, -1 where the model has none. `lossless` says
    whether white space and rare characters survive in a probe text.
    """

    path: str
    vocab_size: int
    eod: int
    lossless: bool


def load_model(path: str) -> Model:
    """Read a model from a file.

    Raises:
        DataError: no such file, or not a SentencePiece model.
    """
    if not Path(path).is_file():
        raise DataError(f"--tokenizer-model {path} is no file; leave it out to have a model trained.")
    try:
        processor = _processor(path)
    except RuntimeError as error:
        raise DataError(
            f"--tokenizer-model {path} is no SentencePiece model ({error}); give a .model file, or leave it "
            "out to have one trained."
        ) from error
    lossless = processor.decode(processor.encode(_PROBE)) == _PROBE
    return Model(path, processor.get_piece_size(), processor.eos_id(), lossless)


def encode(model_path: str, texts: Sequence[str], eod: int | None) -> tuple[list[array], int]:
    """Encode documents.

    Args:
        model_path: absolute, as it is loaded once per process.
        texts: documents.
        eod: id to append to each, None for none.

    Returns:
        32-bit ids of each document (none at all if the model sees nothing in the text), and how many
        documents do not decode to exactly their text.
    """
    processor = _processor(model_path)
    encoded, changed = [], 0
    for text in texts:
        ids = processor.encode(text)
        changed += processor.decode(ids) != text
        if ids and eod is not None:
            ids.append(eod)
        encoded.append(array("i", ids))
    return encoded, changed


@functools.lru_cache(maxsize=1)
def _processor(path: str) -> "sentencepiece.SentencePieceProcessor":
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=path)
