"""`megatron-ext data` from the command line to Megatron's own reader and tokenizer."""

import argparse
import fcntl
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import sentencepiece

from megatron_ext.tools import data_build, data_dataset
from megatron_ext.tools.data import main
from megatron_ext.tools.data_errors import DataError
from megatron_ext.tools.data_workers import Workers

VOCAB = 400
TEXTS = [
    "def f(x):\n\tif  x:\n\n        return '\u2581 \u00e9 \U0001f600'   \n",
    "no newline at the end",
    "\n\n  \r\n\t",
    Path(__file__).read_text(),
]


@pytest.fixture
def folder(tmp_path):
    """A source tree with one document per text of TEXTS, an empty file and a binary one."""
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    for number, text in enumerate(TEXTS[:3]):
        (root / f"{number}.py").write_bytes(text.encode())
    (root / "sub" / "all.jsonl").write_text(json.dumps({"text": TEXTS[3]}) + "\n")
    (root / "__init__.py").touch()
    (root / "sub" / "binary.txt").write_bytes(b"\0\1\2")
    return root


def _run(folder, *extra, output=None, vocab=VOCAB):
    output = output or folder.parent / "out" / "corpus"
    size = ["--vocab-size", str(vocab)] if vocab else []
    return main(["--input", str(folder), "--output", str(output), "--workers", "1", *size, *extra])


def _out(folder):
    out = folder.parent / "out"
    return {path.name: path.read_bytes() for path in out.iterdir()} if out.exists() else {}


FILES = {"corpus.model", "corpus.json", "corpus_text_document.bin", "corpus_text_document.idx"}


@pytest.fixture
def fails(capsys):
    """Runs, expects exit code 2, gives back the error line(s)."""

    def run(*args, **kwargs):
        assert _run(*args, **kwargs) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error[error.index("megatron-ext data: error: ") :]

    return run


def _megatron_tokenizer(model):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = argparse.Namespace(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=str(model),
        metadata_path=None,
        chat_template=None,
        tokenizer_sentencepiece_ignore_extra_whitespaces=True,
        tokenizer_sentencepiece_legacy=False,
        special_tokens=None,
        pad_vocab_size=True,
        padded_vocab_size=None,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=1,
        rank=1,
    )
    return build_tokenizer(args), args


def test_megatron_reads_back_what_its_tokenizer_makes_of_the_texts(folder, capsys):
    assert _run(folder) == 0
    captured = capsys.readouterr()
    assert set(_out(folder)) == FILES
    prefix = folder.parent / "out" / "corpus"

    tokenizer, args = _megatron_tokenizer(f"{prefix}.model")
    assert (tokenizer.vocab_size, args.padded_vocab_size, tokenizer.eod) == (VOCAB, 512, 2)
    dataset = data_dataset.import_indexed_dataset().IndexedDataset(f"{prefix}_text_document")
    expected = [[*tokenizer.tokenize(text), tokenizer.eod] for text in TEXTS]
    assert [document.tolist() for document in dataset] == expected
    assert dataset.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert dataset[0].dtype == numpy.uint16
    assert max(map(max, expected)) < VOCAB
    assert [tokenizer.detokenize(document[:-1]) for document in expected] == TEXTS

    tokens = sum(map(len, expected))
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert "documents  4\n" in captured.out
    assert f"tokens     {tokens} ({num_bytes / tokens:.2f} bytes per token)" in captured.out
    assert captured.out.endswith(
        f"Megatron flags:\n  --data-path {prefix}_text_document --tokenizer-type SentencePieceTokenizer "
        f"--tokenizer-model {prefix}.model\n"
    )
    assert "left out: " in captured.err
    assert "binary.txt (byte 0): is binary" in captured.err
    assert "__init__.py: is empty." in captured.err
    assert "encoding 100%" in captured.err
    result = json.loads((folder.parent / "out" / "corpus.json").read_text())["result"]
    assert (result["documents"], result["tokens"], result["text_bytes"]) == (4, tokens, num_bytes)
    assert result["left_out"] == {"binary file": 1, "empty file": 1}


def test_twice_the_same_bytes_whatever_the_number_of_workers(folder, monkeypatch):
    monkeypatch.setattr(data_build, "_BATCH_BYTES", 1)
    assert _run(folder) == 0
    first = _out(folder)
    assert _run(folder, "--force", "--workers", "2") == 0
    second = _out(folder)
    for name in FILES - {"corpus.json"}:
        assert first[name] == second[name], name
    # The manifest names its own model; nothing else in it depends on place or time.
    assert first["corpus.json"] == second["corpus.json"]


def test_up_to_date_output_is_recognised_and_another_is_refused(folder, capsys, fails):
    assert _run(folder) == 0
    report = capsys.readouterr().out
    before = _out(folder)
    assert _run(folder) == 0
    again = capsys.readouterr()
    assert again.out == f"{folder.parent / 'out' / 'corpus'} is up to date.\n{report}"
    assert again.err == ""

    assert "exists and it was made with other --vocab-size; use --force" in fails(folder, vocab=401)
    assert "made with other --append-eod" in fails(folder, "--no-append-eod")
    (folder / "1.py").write_text("changed")
    assert "made with other input files" in fails(folder)
    assert "made with other input files and --errors" in fails(folder, "--errors", "skip")
    assert _out(folder) == before


def test_a_reader_that_stops_early_is_no_error(folder):
    assert _run(folder) == 0
    code = "import sys; from megatron_ext.tools.data import main; sys.exit(main(sys.argv[1:]))"
    prefix = folder.parent / "out" / "corpus"
    arguments = ["--input", str(folder), "--output", str(prefix), "--vocab-size", str(VOCAB)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(data_build.__file__).parents[2],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_damaged_output_is_not_up_to_date(folder, fails):
    assert _run(folder) == 0
    binary = folder.parent / "out" / "corpus_text_document.bin"
    binary.write_bytes(binary.read_bytes()[:-2])
    assert "exists and its files were changed since; use --force" in fails(folder)
    assert _run(folder, "--force") == 0
    model = folder.parent / "out" / "corpus.model"
    model.write_bytes(b"else")
    assert "its files were changed since" in fails(folder)


def test_foreign_files_are_not_overwritten(folder, fails):
    (folder.parent / "out").mkdir()
    (folder.parent / "out" / "corpus.model").write_text("precious")
    error = fails(folder)
    assert "there are files of that name" in error
    assert "corpus.model) without a manifest of this tool" in error
    assert _out(folder) == {"corpus.model": b"precious"}


@pytest.mark.parametrize("moment", ["add", "close"])
def test_interruption_leaves_nothing(folder, monkeypatch, capsys, moment):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(data_dataset.DatasetWriter, moment, interrupt)
    assert _run(folder) == 130
    assert "interrupted; no new output was completed" in capsys.readouterr().err
    assert _out(folder) == {}


def test_full_disk_is_an_error_without_traceback_and_keeps_the_old_output(folder, monkeypatch, fails):
    assert _run(folder) == 0
    before = _out(folder)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data_dataset.DatasetWriter, "add", full)
    assert "No space left on device; no new output was completed" in fails(folder, "--force")
    assert _out(folder) == before


def test_crash_at_any_point_of_publishing_is_repaired_by_the_next_run(folder, monkeypatch):
    class Crash(BaseException):
        """As good as a kill: nothing catches it."""

    assert _run(folder) == 0
    complete = _out(folder)
    for survived in range(4):
        replaced = []

        def replace(source, target, survived=survived, replaced=replaced, really=os.rename):
            if len(replaced) == survived:
                raise Crash
            replaced.append(target)
            really(source, target)

        with monkeypatch.context() as patch:
            patch.setattr("megatron_ext.tools.data_output.os.replace", replace)
            with pytest.raises(Crash):
                _run(folder, "--force")
        assert not (folder.parent / "out" / "corpus_text_document.idx").exists()
        assert _run(folder) == 0, "no --force needed"
        assert _out(folder) == complete


def test_leftovers_of_a_killed_run_are_removed(folder):
    out = folder.parent / "out"
    out.mkdir()
    for name in [*FILES, "corpus"]:
        (out / f"{name}.tmp").write_text("half")
    (out / "corpus.lock").touch()
    assert _run(folder) == 0
    assert set(_out(folder)) == {*FILES, "corpus.tmp"}, "only names of this tool are touched"


def test_a_second_writer_is_kept_out(folder, fails):
    (folder.parent / "out").mkdir()
    with open(folder.parent / "out" / "corpus.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is writing --output" in fails(folder)


def test_megatrons_cached_indices_of_replaced_data_are_removed(folder, capsys):
    assert _run(folder) == 0
    cache = folder.parent / "out" / "corpus_text_document" / "cache" / "GPTDataset_indices"
    cache.mkdir(parents=True)
    assert main(["--input", str(folder), "--output", str(folder.parent / "out" / "corpus"), "--force",
                 "--vocab-size", str(VOCAB)]) == 0  # fmt: skip
    assert not cache.parent.exists()
    assert "removed Megatron's cached indices" in capsys.readouterr().err


def test_input_that_changes_between_the_passes(folder, monkeypatch, fails):
    start = data_dataset.DatasetWriter.__init__

    def grow(self, *args):
        (folder / "new.py").write_text("x")
        (folder / "0.py").write_text("y")
        start(self, *args)

    monkeypatch.setattr(data_dataset.DatasetWriter, "__init__", grow)
    assert "an input file changed while it was read" in fails(folder)
    assert _out(folder) == {}


def test_all_problems_are_listed_at_once_before_anything_is_written(folder, fails):
    (folder / "bad.jsonl").write_text("{\n" * 30)
    (folder / "a.txt").write_bytes(b"\xff")
    error = fails(folder, "--errors", "stop")
    assert "a.txt: is not UTF-8 at byte 0" in error
    assert "binary.txt (byte 0): is binary" in error
    assert "bad.jsonl:1: is no valid JSON" in error
    assert error.rstrip().endswith("and 27 more")
    assert _out(folder) == {}


def test_errors_skip_and_replace(folder, capsys):
    bad = folder.parent / "bad.txt"
    bad.write_bytes(b"x\xff")
    out = folder.parent / "out" / "corpus"
    args = [
        "--input",
        str(folder / "1.py"),
        str(bad),
        "--output",
        str(out),
        "--vocab-size",
        "280",
        "--workers",
        "1",
    ]
    assert main(args) == 2
    assert main([*args, "--errors", "skip"]) == 0
    assert "left out   undecodable text: 1" in capsys.readouterr().out
    assert main([*args, "--errors", "replace", "--force"]) == 0
    assert "documents  2" in capsys.readouterr().out


def test_no_text_at_all(tmp_path, fails):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").touch()
    assert "no text in 1 input file(s): all are empty or left out" in fails(tmp_path / "in")
    assert _out(tmp_path / "in") == {}


def test_vocabulary_that_the_input_cannot_give(folder, fails):
    assert "--vocab-size 100000 is too large for this input: the largest possible is" in fails(
        folder, vocab=100000
    )
    assert "--vocab-size 100 is too small for this input" in fails(folder, vocab=100)
    assert _out(folder) == {}


def test_output_that_cannot_be_written(folder, fails):
    assert "cannot be written" in fails(folder, output=folder / "0.py" / "corpus")
    assert "is a folder; give the start of a name" in fails(folder, output=f"{folder}/")


def test_vocab_size_is_needed_without_a_model(folder, fails):
    assert "--vocab-size is needed to train a tokenizer" in fails(folder, vocab=None)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--vocab-size", "0"),
        ("--workers", "-1"),
        ("--train-megabytes", "x"),
        ("--suffixes", ","),
        ("--errors", "no"),
    ],
)
def test_bad_option_values(folder, capsys, option, value):
    with pytest.raises(SystemExit, match="2"):
        _run(folder, option, value, vocab=None)
    assert option in capsys.readouterr().err


def _foreign_model(path, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[3].split("\n")),
        model_writer=model,
        vocab_size=VOCAB,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return str(path)


def test_given_model(folder, capsys, fails):
    model = _foreign_model(folder.parent / "lossy.model")
    error = fails(folder, "--tokenizer-model", model, vocab=500)
    assert f"--vocab-size 500 is not the size of --tokenizer-model {model}, which has {VOCAB} pieces" in error
    assert _run(folder, "--tokenizer-model", model, vocab=None) == 0
    captured = capsys.readouterr()
    assert "does not keep all white space" in captured.err
    assert "documents  3\n" in captured.out, "nothing is left of the document of white space only"
    assert "3 documents do not decode to exactly their text" in captured.out
    assert f"--tokenizer-model {model}\n" in captured.out
    assert set(_out(folder)) == FILES - {"corpus.model"}
    assert _run(folder, "--tokenizer-model", model, vocab=None) == 0
    assert "is up to date" in capsys.readouterr().out


def test_given_model_without_end_of_document(folder, fails, capsys):
    model = _foreign_model(folder.parent / "no_eos.model", eos_id=-1, byte_fallback=True)
    assert "has no end-of-sentence piece (</s>)" in fails(folder, "--tokenizer-model", model, vocab=None)
    assert _run(folder, "--tokenizer-model", model, "--no-append-eod", vocab=None) == 0
    assert "none appended" in capsys.readouterr().out


def test_given_model_that_is_none(folder, fails):
    assert "is no SentencePiece model" in fails(folder, "--tokenizer-model", str(folder / "0.py"), vocab=None)
    assert "is no file" in fails(folder, "--tokenizer-model", "gone.model", vocab=None)


def test_outputs_inside_the_input_are_not_read(folder):
    output = folder / "corpus"
    suffixes = ["--suffixes", ".py,.json,model"]
    assert _run(folder, *suffixes, output=output, vocab=300) == 0
    before = output.with_suffix(".json").read_bytes()
    assert _run(folder, *suffixes, output=output, vocab=300) == 0
    assert output.with_suffix(".json").read_bytes() == before


def test_a_worker_that_dies_is_an_error_and_no_hang():
    with Workers(1) as workers, pytest.raises(DataError, match="a worker process died"):
        workers.result(workers.submit(os._exit, 1))


def test_workers_end_when_the_tool_is_interrupted():
    def interrupted():
        with Workers(1) as workers:
            workers.submit(time.sleep, 100)
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - start < 50


def test_workers_keep_the_order_and_draw_tasks_only_as_needed():
    drawn = []

    def tasks():
        for number in range(30):
            drawn.append(number)
            yield (number, 1)

    with Workers(1) as workers:
        results = workers.map(pow, tasks())
        assert next(results) == 0
        assert len(drawn) < 10
        assert list(results) == list(range(1, 30))


def test_workers_end_when_the_tool_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, time\n"
        "from megatron_ext.tools.data_workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    workers = Workers(2)\n"
        "    sleeping = [workers.submit(time.sleep, 60) for _ in range(2)]\n"
        "    while not all(future.running() for future in sleeping): time.sleep(0.1)\n"
        "    time.sleep(1)\n"
        "    print('both', 'started', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(data_build.__file__).parents[2])}
    # The pipe of the output closes only when the last worker is gone, so a survivor would be a timeout here.
    done = subprocess.run(
        [sys.executable, script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=30,
        check=False,
    )
    assert done.returncode == -9
    assert len(done.stdout.split()) == 2


def test_help_does_not_import_torch():
    code = (
        "import sys\n"
        "from megatron_ext.tools.data import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'megatron', 'numpy', 'sentencepiece'} & set(sys.modules)"
    )
    root = Path(data_build.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--exclude" in done.stdout
