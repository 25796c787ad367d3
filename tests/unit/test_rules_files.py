import json
import os
from collections import namedtuple
from pathlib import Path

import pytest

from megatron_ext import rules, rules_files
from tests.unit.stock_args import gpt

MAKE = "`megatron-ext data --input FILES_OR_DIRS --output PREFIX --vocab-size N`"


def problems(**changes):
    return rules.run(gpt(**changes), rules.base_rules())


def real_data(**changes):
    return problems(mock_data=False, **changes)


@pytest.fixture
def corpus(tmp_path):
    """Prefix of a dataset that is there."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus{suffix}").touch()
    return str(tmp_path / "corpus")


def test_no_data():
    (text,) = real_data()
    assert text == (
        f"No data is given. Set --data-path PREFIX (a dataset made by {MAKE}), or --mock-data for generated "
        "tokens."
    )


@pytest.mark.parametrize(
    "changes",
    [{"dataloader_type": "external"}, {"perform_rl_step": True}, {"skip_train": True}],
)
def test_jobs_that_need_no_data_options(changes):
    assert real_data(**changes) == []


def test_script_with_data_options_of_its_own():
    args = gpt(mock_data=False)
    assert rules_files.data_given(args)
    args.dataset_config = "vlm.yaml"
    assert rules_files.data_given(args) is None


def test_data_that_is_there(corpus):
    for value in ([corpus], ["0.3", corpus, "0.7", corpus], [corpus, corpus]):
        assert real_data(data_path=value) == []
    assert real_data(train_data_path=[corpus], valid_data_path=[corpus], test_data_path=["1", corpus]) == []
    assert real_data(data_path=["s3://bucket/corpus"]) == []


def test_missing_data(corpus, tmp_path):
    nowhere = f"{tmp_path}/no/where"
    (text,) = real_data(data_path=["0.3", corpus, "0.7", nowhere])
    assert text.splitlines() == [
        f"--data-path {nowhere} needs {nowhere}.bin and {nowhere}.idx, but {nowhere}.bin and {nowhere}.idx "
        f"cannot be found (there is no folder {tmp_path}/no).",
        f"Correct the path, or make the dataset: {MAKE}.",
    ]


def test_half_a_dataset(corpus):
    os.remove(corpus + ".idx")
    (text,) = real_data(data_path=[corpus])
    assert f"but {corpus}.idx cannot be found." in text


def test_every_missing_dataset_is_named(corpus, tmp_path):
    (text,) = real_data(train_data_path=[corpus, f"{tmp_path}/b"], valid_data_path=[f"{tmp_path}/c"])
    assert f"--train-data-path {tmp_path}/b needs" in text
    assert f"--valid-data-path {tmp_path}/c needs" in text
    assert f"{corpus} needs" not in text


def test_file_of_a_dataset_instead_of_its_prefix(corpus):
    (text,) = real_data(data_path=[corpus + ".bin"])
    assert f"--data-path {corpus}.bin is one file of a dataset" in text
    assert f"the prefix without .bin: {corpus}." in text


def test_path_that_exists_is_left_to_the_script(tmp_path):
    (tmp_path / "chat.jsonl").touch()
    assert real_data(data_path=[str(tmp_path / "chat.jsonl")], sft=True) == []


def test_data_listed_in_a_file(corpus, tmp_path):
    listing = tmp_path / "blend.txt"
    listing.write_text(f"0.3 {corpus}\n0.7 {tmp_path}/absent\n")
    (text,) = real_data(data_args_path=str(listing))
    assert text.startswith(f"--data-args-path {tmp_path}/absent needs ")
    listing.write_text(corpus)
    assert real_data(data_args_path=str(listing)) == []


def test_data_listed_in_a_file_that_is_missing(tmp_path):
    (text,) = real_data(data_args_path=f"{tmp_path}/blend.txt")
    assert text.startswith(
        f"--data-args-path {tmp_path}/blend.txt cannot be read (No such file or directory)."
    )
    assert real_data(data_args_path="msc://bucket/blend.txt") == []


def test_data_listed_per_split(corpus, tmp_path):
    listing = tmp_path / "splits.json"
    listing.write_text(
        json.dumps({"train": [0.5, corpus, 0.5, corpus], "valid": f"1 {corpus}", "test": None})
    )
    assert real_data(per_split_data_args_path=str(listing)) == []
    listing.write_text(json.dumps({"train": [corpus], "valid": f"1 {tmp_path}/absent", "test": [corpus]}))
    assert (
        f"--per-split-data-args-path {tmp_path}/absent needs"
        in real_data(per_split_data_args_path=str(listing))[0]
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "is not JSON (Expecting property name"),
        ("[]", 'must be a JSON object with "train", "valid" and "test"'),
        ('{"train": []}', 'must be a JSON object with "train", "valid" and "test"'),
    ],
)
def test_malformed_list_per_split(text, part, tmp_path):
    listing = tmp_path / "splits.json"
    listing.write_text(text)
    assert part in real_data(per_split_data_args_path=str(listing))[0]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["mock_data", "data_path"], "--mock-data and --data-path"),
        (["mock_data", "valid_data_path"], "--mock-data and --valid-data-path"),
        (["data_path", "train_data_path"], "--data-path and --train-data-path"),
        (["data_path", "data_args_path"], "--data-path and --data-args-path"),
        (["test_data_path", "per_split_data_args_path"], "--test-data-path and --per-split-data-args-path"),
    ],
)
def test_two_sources_of_data(names, text, corpus, tmp_path):
    (tmp_path / "blend.txt").write_text(corpus)
    (tmp_path / "splits.json").write_text(json.dumps(dict.fromkeys(("train", "valid", "test"), corpus)))
    files = {"data_args_path": "blend.txt", "per_split_data_args_path": "splits.json"}
    values = {n: str(tmp_path / files[n]) if n in files else [corpus] for n in names if n != "mock_data"}
    (found,) = problems(**({"mock_data": "mock_data" in names} | values))
    assert found == f"{text} both say where the data comes from: keep one."


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"tokenizer_type": None},
            [
                "--tokenizer-type is not given",
                "SentencePieceTokenizer --tokenizer-model FILE",
                "NullTokenizer",
            ],
        ),
        ({"vocab_size": None}, ["--tokenizer-type NullTokenizer needs --vocab-size N"]),
        (
            {"tokenizer_type": "SentencePieceTokenizer"},
            ["SentencePieceTokenizer needs --tokenizer-model (`megatron-ext data` trains one"],
        ),
        ({"tokenizer_type": "TikTokenizer"}, ["--tokenizer-type TikTokenizer needs --tokenizer-model."]),
        (
            {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "no.model"},
            ["--tokenizer-model no.model does not exist. Correct the path", MAKE],
        ),
        (
            {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "./no"},
            ["--tokenizer-model ./no does not exist. Correct the path."],
        ),
    ],
)
def test_tokenizer(changes, parts):
    (text,) = problems(**changes)
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("HuggingFaceTokenizer", "org/name"),  # a name on the hub
        ("SentencePieceTokenizer", __file__),
        ("TikTokenizer", "msc://bucket/vocab.json"),
        ("GPT2BPETokenizer", None),
    ],
)
def test_tokenizers_that_stock_accepts(kind, model):
    assert problems(tokenizer_type=kind, tokenizer_model=model) == []


OUTPUTS = ["save", "tensorboard_dir", "ext_report", "ext_dump_grads"]


@pytest.mark.parametrize("name", OUTPUTS)
def test_output_under_a_file(name, tmp_path):
    (tmp_path / "file").touch()
    folder = f"{tmp_path}/file/deeper"
    (text,) = problems(**{name: folder, "save_interval": 1})
    flag = "--" + name.replace("_", "-")
    assert text == (
        f"{flag} {folder} cannot be written: {tmp_path}/file is a file, not a folder.\n"
        "Choose a folder that you can write."
    )


def test_output_folder_is_not_made(tmp_path):
    assert problems(save=f"{tmp_path}/a/b", save_interval=1, ext_report=str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_output_at_a_dangling_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    why = rules_files.why_not_writable(f"{tmp_path}/link")
    assert why == f"{tmp_path}/link is a link to something that does not exist"


def test_output_that_only_trying_refuses():
    # Root may write everywhere by permission; the kernel's own file systems refuse all the same.
    why = rules_files.why_not_writable("/proc/self/report")
    assert why is not None
    assert why.endswith("/proc/self")


def test_output_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert rules_files.why_not_writable(str(tmp_path)) == f"you have no permission to write in {tmp_path}"


def test_output_on_a_read_only_file_system(tmp_path, monkeypatch):
    flags = namedtuple("statvfs", "f_flag")
    monkeypatch.setattr(os, "statvfs", lambda path: flags(os.ST_RDONLY))
    assert rules_files.why_not_writable(str(tmp_path)) == f"the file system of {tmp_path} is read-only"


def test_output_on_remote_storage():
    assert problems(save="msc://bucket/ckpt", save_interval=1) == []


def test_relative_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rules_files.why_not_writable("runs/a") is None
    Path("runs").touch()
    assert rules_files.why_not_writable("runs/a") == f"{tmp_path}/runs is a file, not a folder"
