"""`megatron-ext data`: from text files, .jsonl or source trees to what Megatron's --data-path takes."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from megatron_ext.tools.data_build import Job, build
from megatron_ext.tools.data_documents import ReadOptions
from megatron_ext.tools.data_errors import DataError
from megatron_ext.tools.data_output import Output, inspect, locked, refuse, sha256
from megatron_ext.tools.data_progress import format_bytes
from megatron_ext.tools.data_sources import DEFAULT_SUFFIXES, Source, find_sources
from megatron_ext.tools.data_tokenizer import Model, load_model


def main(argv: list[str]) -> int:
    """Run the tool; 0 on success, 2 on a user's error, 130 on Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        report = _run(args)
    except DataError as error:
        print(f"megatron-ext data: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"megatron-ext data: error: {error}; no new output was completed.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmegatron-ext data: interrupted; no new output was completed.", file=sys.stderr)
        return 130
    try:
        print(report, flush=True)
    except BrokenPipeError:
        # `| head` has read enough. The interpreter would fail once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _run(args: argparse.Namespace) -> str:
    """Make the output, or find it made; returns the report."""
    if not os.path.basename(args.output):
        raise DataError(f"--output {args.output} is a folder; give the start of a name, {args.output}corpus.")
    if not (args.tokenizer_model or args.vocab_size):
        raise DataError(
            "--vocab-size is needed to train a tokenizer; set it, or give a model with --tokenizer-model."
        )
    output = Output(args.output)
    model = _given_model(args) if args.tokenizer_model else None
    own = {os.path.abspath(path) for path in output.files}
    sources = find_sources(args.input, args.suffixes, args.exclude, never=own)
    request = _request(args, sources)
    state, manifest = inspect(output, request)
    if state == "current" and not args.force:
        return f"{output.prefix} is up to date.\n" + _report(output, manifest["result"])
    if state == "different" and not args.force:
        raise refuse(output, request, manifest)
    job = Job(
        output=output,
        sources=sources,
        read=ReadOptions(args.json_key, args.max_line_chars, args.errors),
        model=model,
        vocab_size=args.vocab_size or model.vocab_size,
        train_bytes=int(args.train_megabytes * 1e6),
        append_eod=args.append_eod,
        workers=args.workers,
    )
    with locked(output):
        result = build(job, request)
    return _report(output, result)


def _given_model(args: argparse.Namespace) -> Model:
    given = f"--tokenizer-model {args.tokenizer_model}"
    model = load_model(os.path.abspath(args.tokenizer_model))
    if args.vocab_size not in (None, model.vocab_size):
        raise DataError(
            f"--vocab-size {args.vocab_size} is not the size of {given}, which has {model.vocab_size} "
            "pieces; leave --vocab-size out, or leave the model out to have one trained."
        )
    if args.append_eod and model.eod < 0:
        raise DataError(
            f"{given} has no end-of-sentence piece (</s>), which Megatron uses as end of document; use "
            "another model, or --no-append-eod."
        )
    if not model.lossless:
        print(
            f"warning: {given} does not keep all white space and characters, so text decoded from it differs "
            "from the input; a model trained by this tool keeps everything.",
            file=sys.stderr,
        )
    return model


def _request(args: argparse.Namespace, sources: Sequence[Source]) -> dict[str, Any]:
    """Everything the output depends on, in JSON's types."""
    return {
        "input files": [[os.path.abspath(source.path), source.size, source.mtime_ns] for source in sources],
        "--vocab-size": args.vocab_size,
        "--tokenizer-model": sha256(args.tokenizer_model) if args.tokenizer_model else None,
        "--train-megabytes": args.train_megabytes,
        "--json-key": args.json_key,
        "--append-eod": args.append_eod,
        "--max-line-chars": args.max_line_chars,
        "--errors": args.errors,
    }


def _report(output: Output, result: dict[str, Any]) -> str:
    model = result["model"]
    if model == str(output.model.absolute()):
        model = str(output.model)
    tokens = result["tokens"]
    eod = "none appended" if result["eod"] is None else f"end of document {result['eod']}"
    size = format_bytes(result["bin_bytes"])
    lines = [
        f"documents  {result['documents']}",
        f"tokens     {tokens} ({result['text_bytes'] / max(1, tokens):.2f} bytes per token)",
        f"tokenizer  {model} ({result['vocab_size']} pieces, {eod})",
        f"dataset    {output.bin} ({size}), {output.idx}; manifest {output.manifest}",
        *(f"left out   {kind}: {count}" for kind, count in result["left_out"].items()),
    ]
    if changed := result["documents_decoding_differently"]:
        lines.append(
            f"note       {changed} documents do not decode to exactly their text with this tokenizer"
        )
    lines += [
        "Megatron flags:",
        f"  --data-path {shlex.quote(output.dataset)} --tokenizer-type SentencePieceTokenizer "
        f"--tokenizer-model {shlex.quote(model)}",
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ext data",
        description="Make a Megatron dataset (PREFIX_text_document.bin and .idx) and, unless one is given, a "
        "SentencePiece tokenizer (PREFIX.model) from text. Same input and options give the same bytes.",
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="text files (one document each), .jsonl files (one document per line), both also as .gz, and "
        "folders, which are searched",
    )
    files.add_argument(
        "--output", required=True, metavar="PREFIX", help="start of the names of all files written"
    )
    files.add_argument("--force", action="store_true", help="replace an existing output")
    files.add_argument(
        "--suffixes",
        type=_suffixes,
        default=list(DEFAULT_SUFFIXES),
        metavar=".A,.B",
        help=f"endings of the files taken from folders (default {','.join(DEFAULT_SUFFIXES)})",
    )
    files.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names or patterns of files and folders to leave out of folders, at any depth",
    )
    _add_tokenizer_options(parser.add_argument_group("tokenizer"))
    _add_reading_options(parser.add_argument_group("reading"))
    return parser


def _add_tokenizer_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--vocab-size", type=_positive, metavar="N", help="train this many pieces, exactly")
    group.add_argument("--tokenizer-model", metavar="FILE", help="use this SentencePiece model, train none")
    group.add_argument(
        "--train-megabytes",
        type=_megabytes,
        default=32.0,
        metavar="M",
        help="train on at most this much text, spread evenly over the input (default %(default)g)",
    )
    group.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's </s>, Megatron's eod (default: on)",
    )
    group.add_argument(
        "--workers", type=_positive, default=2, metavar="W", help="processes (default %(default)s)"
    )


def _add_reading_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json-key",
        default="text",
        metavar="KEY",
        help="where a .jsonl line has its text (default %(default)s)",
    )
    group.add_argument(
        "--errors",
        choices=["stop", "skip", "replace"],
        help="what to do with text that cannot be used (not UTF-8, binary, bad JSON, huge lines): stop, "
        "leave it out, or put U+FFFD for what is not UTF-8 (default: stop for files given by name, skip in "
        "folders)",
    )
    group.add_argument(
        "--max-line-chars",
        type=_positive,
        default=1_000_000,
        metavar="C",
        help="longest line that is taken for text (default %(default)s)",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def _megabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.001 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number between 0.001 and 1000000")
    return value


def _suffixes(text: str) -> list[str]:
    suffixes = [f".{part.strip().removeprefix('.')}" for part in text.split(",") if part.strip()]
    if not suffixes:
        raise argparse.ArgumentTypeError("give at least one ending, such as .py,.md")
    return suffixes
