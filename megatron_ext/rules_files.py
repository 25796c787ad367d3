"""Rules about files: data and tokenizer must be there, output folders must be writable."""

import json
import os
import tempfile
from argparse import Namespace
from pathlib import Path

from megatron_ext.problems import UserError
from megatron_ext.rules_training import DATA_OPTIONS, is_training

SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
MAKE_DATA = "megatron-ext data --input FILES_OR_DIRS --output PREFIX --vocab-size N"

# Stock options with "data" in their names that do not say where training data is.
NO_LOCATIONS = ("metadata_path", "data_cache_path", "data_parallel_sharding_strategy", "dataloader_type")

PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")

OUTPUT_FOLDERS = {
    "save": "--save",
    "tensorboard_dir": "--tensorboard-dir",
    "ext_report": "--ext-report",
    "ext_dump_grads": "--ext-dump-grads",
    "ext_trace": "--ext-trace",
}


def is_remote(path: str) -> bool:
    """Whether the path is a URL (s3://, msc://, ...), which cannot be looked at from here."""
    return "://" in path


def prefixes(words: list[str]) -> list[str]:
    """Dataset prefixes of a blend: all words, or every second one when weights stand between them."""
    weights, paths = words[0::2], words[1::2]
    if len(words) % 2 == 0 and all(_is_number(word) for word in weights):
        return paths
    return words


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def missing_data(prefix: str) -> str | None:
    """Why no indexed dataset can be read at PREFIX, or None.

    A path that exists itself is left to the script: it may read something else than an indexed dataset.
    """
    if is_remote(prefix):
        return None
    files = [f"{prefix}.bin", f"{prefix}.idx"]
    absent = [name for name in files if not os.path.exists(name)]
    stem, suffix = os.path.splitext(prefix)
    if absent and suffix in (".bin", ".idx") and os.path.exists(f"{stem}.idx"):
        return f"is one file of a dataset; the option takes the prefix without {suffix}: {stem}"
    if not absent or (len(absent) == 2 and os.path.exists(prefix)):
        return None
    folder = os.path.dirname(prefix) or "."
    where = "" if os.path.isdir(folder) else f" (there is no folder {folder})"
    return f"needs {' and '.join(files)}, but {' and '.join(absent)} cannot be found{where}"


def data_given(args: Namespace) -> str | None:
    """A training job says where its data is, or that it wants generated data.

    Without either, stock builds its GPT dataset from nothing and fails. A script with a data loader of its
    own (--dataloader-type external) or with data options of its own is not judged.
    """
    own = any(
        value and isinstance(value, (str, list))
        for name, value in vars(args).items()
        if "data" in name and name not in NO_LOCATIONS
    )
    elsewhere = args.dataloader_type == "external" or getattr(args, "perform_rl_step", False)
    if own or elsewhere or args.mock_data or args.use_checkpoint_args or not is_training(args):
        return None
    return (
        f"No data is given. Set --data-path PREFIX (a dataset made by `{MAKE_DATA}`), or --mock-data for "
        "generated tokens."
    )


def one_data_source(args: Namespace) -> str | None:
    """Options that say where the data comes from do not contradict each other."""
    split = next(
        (flag for name, flag in DATA_OPTIONS.items() if name in PER_SPLIT and getattr(args, name)), None
    )
    path = "--data-path" if args.data_path else None
    mock = "--mock-data" if args.mock_data else None
    path_file = "--data-args-path" if args.data_args_path else None
    split_file = "--per-split-data-args-path" if args.per_split_data_args_path else None
    pairs = ((mock, path), (mock, split), (path, split), (path, path_file), (split, split_file))
    clash = next((pair for pair in pairs if all(pair)), None)
    return f"{' and '.join(clash)} both say where the data comes from: keep one." if clash else None


def data_exists(args: Namespace) -> str | None:
    """Every dataset named by an option, or listed in a file named by one, is there."""
    lines = []
    for name, flag in DATA_OPTIONS.items():
        value = getattr(args, name)
        if not value or (isinstance(value, str) and is_remote(value)):
            continue
        try:
            named = blend_file(value, name) if isinstance(value, str) else prefixes(value)
        except UserError as error:
            lines.append(f"{flag} {value} {error}")
            continue
        reasons = {prefix: missing_data(prefix) for prefix in named}
        lines += [f"{flag} {prefix} {why}." for prefix, why in reasons.items() if why]
    if not lines:
        return None
    return "\n".join([*lines, f"Correct the path, or make the dataset: `{MAKE_DATA}`."])


def blend_file(path: str, name: str) -> list[str]:
    """The prefixes in the file of --data-args-path (words) or --per-split-data-args-path (JSON).

    Raises UserError when the file cannot be read or has another form.
    """
    try:
        text = Path(path).read_text()
        if name != "per_split_data_args_path":
            return prefixes(text.split())
        splits = json.loads(text)
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise UserError(f"is not JSON ({error}).") from error
    if not isinstance(splits, dict) or not {"train", "valid", "test"} <= set(splits):
        raise UserError('must be a JSON object with "train", "valid" and "test", each a blend of prefixes.')
    named: list[str] = []
    for blend in (splits[split] or [] for split in ("train", "valid", "test")):
        named += prefixes(blend.split() if isinstance(blend, str) else [str(word) for word in blend])
    return named


def tokenizer_given(args: Namespace) -> str | None:
    """The tokenizer's type is known and its files are there."""
    kind, model = args.tokenizer_type, args.tokenizer_model
    if args.use_checkpoint_args:
        return None
    if kind is None:
        return (
            "--tokenizer-type is not given. With data of `megatron-ext data`: --tokenizer-type "
            "SentencePieceTokenizer --tokenizer-model FILE; with --mock-data: --tokenizer-type "
            "NullTokenizer --vocab-size N."
        )
    if kind in ("NullTokenizer", "NullMultimodalTokenizer"):
        missing = f"--tokenizer-type {kind} needs --vocab-size N, the number of token ids."
        return None if args.vocab_size else missing
    if kind in (*SENTENCEPIECE, "TikTokenizer", "HuggingFaceTokenizer", "SFTTokenizer"):
        if not model:
            hint = " (`megatron-ext data` trains one and names it)" if kind in SENTENCEPIECE else ""
            return f"--tokenizer-type {kind} needs --tokenizer-model{hint}."
        # Hugging Face takes names of its hub too; only what is clearly a path can be missing.
        is_path = kind in (*SENTENCEPIECE, "TikTokenizer") or model.startswith(("/", "./", "../"))
        if is_path and not is_remote(model) and not os.path.exists(model):
            return f"--tokenizer-model {model} does not exist. Correct the path{_make_tokenizer(kind)}."
    return None


def _make_tokenizer(kind: str) -> str:
    return f", or make data and tokenizer: `{MAKE_DATA}`" if kind in SENTENCEPIECE else ""


def why_not_writable(folder: str) -> str | None:
    """Why files cannot be made in this folder, which may not exist yet, or None. Leaves nothing behind."""
    path = Path(folder).absolute()
    there = next(p for p in (path, *path.parents) if os.path.lexists(p))
    try:
        if not there.exists():
            return f"{there} is a link to something that does not exist"
        if not there.is_dir():
            return f"{there} is a file, not a folder"
        if os.statvfs(there).f_flag & os.ST_RDONLY:
            return f"the file system of {there} is read-only"
        if not os.access(there, os.W_OK | os.X_OK):
            return f"you have no permission to write in {there}"
        # root has every permission, and some file systems (/proc) refuse anyway: only trying tells.
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"{error.strerror} in {there}"


def outputs_writable(args: Namespace) -> str | None:
    """Folders that the job writes to can be written, or made."""
    lines = []
    for name, flag in OUTPUT_FOLDERS.items():
        folder = getattr(args, name, None)
        if folder and not is_remote(folder) and (why := why_not_writable(folder)):
            lines.append(f"{flag} {folder} cannot be written: {why}.")
    return "\n".join([*lines, "Choose a folder that you can write."]) if lines else None


FILE_RULES = (data_given, one_data_source, data_exists, tokenizer_given, outputs_writable)
