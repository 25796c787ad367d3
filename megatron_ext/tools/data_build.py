"""The two passes over the input: check it and draw the training sample, then encode and write."""

import importlib.metadata
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_ext import __version__
from megatron_ext.tools.data_documents import Document, ReadOptions, SourceReader
from megatron_ext.tools.data_errors import DataError, Problem
from megatron_ext.tools.data_output import SCHEMA, Output, publish, sha256, temporary
from megatron_ext.tools.data_progress import Progress, format_bytes
from megatron_ext.tools.data_sources import Source
from megatron_ext.tools.data_tokenizer import LineSample, Model, encode, load_model, train
from megatron_ext.tools.data_workers import Workers

if TYPE_CHECKING:
    from megatron_ext.tools.data_dataset import DatasetWriter

_BATCH_BYTES = 256 * 1024
_PROBLEMS_SHOWN = 20
_PROBLEMS_SHOWN_PER_FILE = 3


@dataclass(frozen=True)
class Job:
    """One corpus to make.

    Args:
        output: where it goes; its lock is held.
        sources: the input.
        read: how the input becomes documents.
        model: the tokenizer, or None to train one of `vocab_size` pieces on `train_bytes` of the input.
        append_eod: end each document with the tokenizer's eod.
        workers: number of processes.
    """

    output: Output
    sources: Sequence[Source]
    read: ReadOptions
    model: Model | None
    vocab_size: int
    train_bytes: int
    append_eod: bool
    workers: int


@dataclass
class Survey:
    """What one pass over the input found."""

    documents: int = 0
    num_bytes: int = 0
    left_out: Counter = field(default_factory=Counter)
    first: dict[str, Problem] = field(default_factory=dict)

    def add(self, item: Document | Problem) -> None:
        if isinstance(item, Document):
            self.documents += 1
            self.num_bytes += item.num_bytes
        else:
            self.left_out[item.kind] += 1
            self.first.setdefault(item.kind, item)

    def warn(self) -> None:
        """Print one line for each kind of problem."""
        for kind, count in sorted(self.left_out.items()):
            more = "" if count == 1 else f" ({count} of this kind)"
            print(f"warning: left out: {self.first[kind]}{more}", file=sys.stderr)


def build(job: Job, request: dict[str, Any]) -> dict[str, Any]:
    """Make the corpus and publish it.

    Args:
        job: what to make.
        request: the same as plain data, kept in the manifest to recognise the output later.

    Returns:
        The manifest's account of the result.

    Raises:
        DataError: the input cannot be used, the vocabulary size is impossible, a worker died.
    """
    sample = None if job.model else LineSample(job.train_bytes)
    survey = check(job.sources, job.read, sample)
    survey.warn()
    with Workers(job.workers) as workers:
        model = job.model if sample is None else _train(job, sample, survey, workers)
        assert model is not None, "neither given nor trained"
        if sample is None:
            _load_megatron()
        written = _encode_all(job, survey, model, workers)
    output = job.output
    result = {
        **written,
        "text_bytes": survey.num_bytes,
        "left_out": dict(sorted(survey.left_out.items())),
        "vocab_size": model.vocab_size,
        "eod": model.eod if job.append_eod else None,
        "bin_bytes": temporary(output.bin).stat().st_size,
        "idx_bytes": temporary(output.idx).stat().st_size,
        "model": model.path if job.model else str(output.model.absolute()),
        "model_sha256": sha256(model.path),
    }
    made_by = {"megatron_ext": __version__, "sentencepiece": importlib.metadata.version("sentencepiece")}
    if publish(output, {"schema": SCHEMA, "made_by": made_by, "request": request, "result": result}):
        print(f"removed Megatron's cached indices of the old data: {output.dataset}/cache", file=sys.stderr)
    return result


def check(sources: Sequence[Source], options: ReadOptions, sample: LineSample | None) -> Survey:
    """Read everything once: all problems are reported before anything is written; fills the sample.

    Raises:
        DataError: problems that stop the run, listed; or no text at all.
    """
    survey, problems, num_problems = Survey(), [], 0
    total = sum(source.size for source in sources)
    progress = Progress("reading ", total, sys.stderr)
    before = 0
    for source in sources:
        reader = SourceReader(source, options)
        first_of_file = num_problems
        for item in reader:
            if isinstance(item, Problem) and item.fatal:
                if (
                    num_problems - first_of_file < _PROBLEMS_SHOWN_PER_FILE
                    and len(problems) < _PROBLEMS_SHOWN
                ):
                    problems.append(item)
                num_problems += 1
                continue
            survey.add(item)
            if sample is not None and isinstance(item, Document):
                sample.add(item.text)
            progress.update(before + reader.position, survey.documents)
        before += source.size
    progress.finish(total, survey.documents)
    if problems:
        shown = "".join(f"\n  {problem}" for problem in problems)
        more = f"\n  and {num_problems - len(problems)} more" if num_problems > len(problems) else ""
        raise DataError(f"the input cannot be used as it is (--errors skip leaves this out):{shown}{more}")
    if not survey.documents:
        survey.warn()
        raise DataError(f"no text in {len(sources)} input file(s): all are empty or left out; see --input.")
    return survey


def _train(job: Job, sample: LineSample, survey: Survey, workers: Workers) -> Model:
    part = f"{format_bytes(sample.num_bytes)} of {format_bytes(survey.num_bytes)}"
    print(f"training a tokenizer of {job.vocab_size} pieces on {part} ...", file=sys.stderr)
    training = workers.submit(train, sample.lines, job.vocab_size)
    # Importing Megatron takes about as long as training on a usual sample, so they run side by side.
    _load_megatron()
    path = temporary(job.output.model).absolute()
    path.write_bytes(workers.result(training))
    model = load_model(str(path))
    assert model.vocab_size == job.vocab_size, f"{model.vocab_size} pieces, not {job.vocab_size}"
    assert model.lossless, "the trained model does not give back the probe text"
    return model


def _load_megatron() -> None:
    print("loading Megatron's dataset writer (10-20 s) ...", file=sys.stderr)
    from megatron_ext.tools.data_dataset import import_indexed_dataset

    import_indexed_dataset()


def _encode_all(job: Job, survey: Survey, model: Model, workers: Workers) -> dict[str, int]:
    """The second pass; must find what the first one found."""
    from megatron_ext.tools.data_dataset import DatasetWriter

    again = Survey()
    writer = DatasetWriter(temporary(job.output.bin), model.vocab_size)
    try:
        written = _write(job, survey.num_bytes, again, model, workers, writer)
        writer.close(temporary(job.output.idx))
    finally:
        writer.abandon()
    if (again.documents, again.num_bytes) != (survey.documents, survey.num_bytes):
        raise DataError("an input file changed while it was read; start again when nothing writes to it.")
    return written


def _write(
    job: Job, total: int, again: Survey, model: Model, workers: Workers, writer: "DatasetWriter"
) -> dict[str, int]:
    eod = model.eod if job.append_eod else None
    sizes: list[int] = []

    def tasks() -> Iterator[tuple[str, list[str], int | None]]:
        for batch in _batches(job.sources, job.read, again):
            sizes.append(sum(document.num_bytes for document in batch))
            yield model.path, [document.text for document in batch], eod

    progress = Progress("encoding", total, sys.stderr)
    documents = tokens = changed = done = 0
    for number, (encoded, differing) in enumerate(workers.map(encode, tasks())):
        for ids in filter(len, encoded):
            writer.add(ids)
            documents += 1
            tokens += len(ids)
        changed += differing
        done += sizes[number]
        progress.update(done, documents)
    progress.finish(done, documents)
    assert job.model or not changed, f"{changed} documents do not decode to their text"
    return {"documents": documents, "tokens": tokens, "documents_decoding_differently": changed}


def _batches(sources: Sequence[Source], options: ReadOptions, survey: Survey) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for source in sources:
        for item in SourceReader(source, options):
            survey.add(item)
            if isinstance(item, Document):
                batch.append(item)
                size += item.num_bytes
                if size >= _BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
    if batch:
        yield batch
