"""SentencePiece models that lose nothing, of exactly the size asked for."""

import io
import os
from pathlib import Path

import pytest
import sentencepiece

from megatron_ext.tools.data_errors import DataError
from megatron_ext.tools.data_tokenizer import LineSample, encode, load_model, train

LINES = [*Path(__file__).read_text().split("\n"), "\u2581\u2582 spark \ue000 line", "\u2585", "tab\there"]
TRICKY = [
    "def f(x):\n\tif  x:\n\n\n        return 1   \n",
    " leading and trailing ",
    "\n",
    "\n\n\n",
    "no newline at the end",
    "\r\nwindows\r\n",
    "\t\t \t",
    "a\x00b\x0c\x1f\x7f",
    "\u2581 is a lower block, \u2581\u2581\u2581 and \u2585 too",
    "\ue000 \ue0000 \ue0001 \ue000\u2581",
    "\u00e9 e\u0301 \ufb01 \u3000 \xa0 \u2028 \ufeff",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u65e5\u672c\u8a9e \u0645\u0631\u062d\u0628\u0627",
    "<unk> <s> </s> <0x0A> <pad>",
    "\ufffd\ufffe",
    "x" * 5000,
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "trained.model"
    path.write_bytes(train(LINES, 512))
    return str(path)


@pytest.mark.parametrize("text", TRICKY)
def test_decoding_gives_exactly_the_text(trained, text):
    processor = sentencepiece.SentencePieceProcessor(model_file=trained)
    ids = processor.encode(text)
    assert processor.decode(ids) == text
    assert max(ids) < 512
    assert processor.unk_id() not in ids
    assert processor.eos_id() not in ids


def test_training_is_deterministic_and_independent_of_the_folder(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train(LINES, 512) == Path(trained).read_bytes()
    assert os.listdir() == []


def test_load_model(trained):
    model = load_model(trained)
    assert (model.vocab_size, model.eod, model.lossless) == (512, 2, True)


def test_encode_appends_eod_and_counts_what_changes(trained):
    encoded, changed = encode(trained, ["a b", "c"], eod=2)
    assert [ids[-1] for ids in encoded] == [2, 2]
    assert encode(trained, ["a b"], eod=None)[0][0] == encoded[0][:-1]
    assert changed == 0


def test_the_largest_size_named_in_the_error_works_and_the_next_one_does_not():
    with pytest.raises(
        DataError, match=r"--vocab-size 20000 is too large .* largest possible is (\d+)"
    ) as info:
        train(LINES[:40], 20000)
    largest = int(str(info.value).split("possible is ")[1].split(".")[0])
    model = sentencepiece.SentencePieceProcessor(model_proto=train(LINES[:40], largest))
    assert model.get_piece_size() == largest
    with pytest.raises(DataError, match=f"largest possible is {largest}"):
        train(LINES[:40], largest + 1)


def test_the_smallest_size_named_in_the_error_works_and_the_one_before_does_not():
    with pytest.raises(DataError, match=r"--vocab-size 10 is too small .* at least (\d+)") as info:
        train(LINES, 10)
    smallest = int(str(info.value).split("at least ")[1].rstrip("."))
    assert (
        sentencepiece.SentencePieceProcessor(model_proto=train(LINES, smallest)).get_piece_size() == smallest
    )
    with pytest.raises(DataError, match=f"at least {smallest}"):
        train(LINES, smallest - 1)


@pytest.mark.parametrize("lines", [[], ["\u2585"]])
def test_nothing_to_train_on(lines):
    with pytest.raises(DataError, match="no line to train a tokenizer on"):
        train(lines, 300)


def test_model_that_is_none(tmp_path):
    with pytest.raises(DataError, match=r"--tokenizer-model .*gone is no file"):
        load_model(str(tmp_path / "gone"))
    for content in (b"", b"no model"):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.model is no SentencePiece model"):
            load_model(str(tmp_path / "bad.model"))


def test_a_model_that_loses_white_space_is_recognised(tmp_path):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, model_type="bpe", vocab_size=200, minloglevel=2
    )
    path = tmp_path / "lossy.model"
    path.write_bytes(model.getvalue())
    assert not load_model(str(path)).lossless
    encoded, changed = encode(str(path), ["a  b", "a b", " "], eod=2)
    assert changed == 2
    assert len(encoded[2]) == 0, "no end of document after a document without tokens"


def test_sample_takes_everything_that_fits():
    sample = LineSample(100)
    sample.add("one\n\ntwo\n")
    sample.add("three")
    assert sample.lines == ["one", "two", "three"]
    assert sample.num_bytes == 11


def test_sample_is_bounded_and_evenly_spread():
    sample = LineSample(4000)
    for start in range(0, 10_000, 100):
        sample.add("\n".join(f"{number:08d}" for number in range(start, start + 100)))
    numbers = [int(line) for line in sample.lines]
    assert 2000 <= sample.num_bytes <= 4000
    assert sample.num_bytes == 8 * len(sample.lines)
    assert numbers == list(range(0, 10_000, sample.stride))


def test_sample_cuts_very_long_lines():
    sample = LineSample(10**6)
    sample.add("x" * 10_000)
    assert list(map(len, sample.lines)) == [4096, 4096, 1808]
