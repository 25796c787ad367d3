"""From files to documents: one per text file, or one per line of a .jsonl file."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

from megatron_ext.tools.data_errors import Problem
from megatron_ext.tools.data_sources import Source

# Encoding takes about 45 bytes of memory per byte of text, so a file far beyond this does not fit a worker.
MAX_DOCUMENT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Document:
    """A text that becomes one document of the dataset; `num_bytes` is its length in UTF-8."""

    text: str
    num_bytes: int


@dataclass(frozen=True)
class ReadOptions:
    """How inputs become documents.

    Args:
        json_key: where a .jsonl line keeps its text.
        max_line_chars: longest line accepted, in characters.
        errors: what to do with text that cannot be used; None means stop for files given by name and skip in
            folders. "replace" puts U+FFFD for bytes that are not UTF-8 and otherwise does as None does.
    """

    json_key: str = "text"
    max_line_chars: int = 1_000_000
    errors: Literal["stop", "skip", "replace"] | None = None

    def fatal(self, source: Source) -> bool:
        return source.named if self.errors in (None, "replace") else self.errors == "stop"


class SourceReader:
    """Iterates over the documents and problems of one file.

    `position` is how far the file has been read, in bytes on disk, for progress.
    """

    def __init__(self, source: Source, options: ReadOptions) -> None:
        self.source = source
        self.options = options
        self.position = 0
        self._fatal = options.fatal(source)

    def __iter__(self) -> Iterator[Document | Problem]:
        try:
            with open(self.source.path, "rb") as raw:
                stream = gzip.GzipFile(fileobj=raw) if self.source.is_gzip else raw
                items = self._json_lines(stream, raw) if self.source.is_jsonl else self._whole_text(stream)
                yield from items
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield self._problem("broken gzip", "", f"is no valid gzip file ({error}); compress it again.")
        except OSError as error:
            yield self._problem("unreadable file", "", f"cannot be read: {error.strerror or error}.")
        self.position = self.source.size

    def _problem(self, kind: str, place: str, what: str) -> Problem:
        return Problem(kind, self.source.path + place, what, self._fatal)

    def _whole_text(self, stream: BinaryIO) -> Iterator[Document | Problem]:
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
        if not data:
            yield Problem("empty file", self.source.path, "is empty.", fatal=False)
        elif len(data) > MAX_DOCUMENT_BYTES:
            yield self._problem(
                "huge file",
                "",
                f"is over {MAX_DOCUMENT_BYTES >> 20} MiB, and a text file is one document; split it, or "
                "give it as .jsonl with one document per line.",
            )
        elif (nul := data.find(b"\0")) >= 0:
            yield self._problem(
                "binary file",
                f" (byte {nul})",
                "is binary (it has a NUL byte); leave it out, or convert it to UTF-8 if it is UTF-16 text.",
            )
        else:
            text = self._decode(data, "", 0)
            if isinstance(text, str):
                longest = max(map(len, text.split("\n")))
                text = self._too_long("", longest) if longest > self.options.max_line_chars else text
            yield text if isinstance(text, Problem) else Document(text, len(text.encode()))

    def _json_lines(self, stream: BinaryIO, raw: BinaryIO) -> Iterator[Document | Problem]:
        # A character takes at most four bytes, so a line cut by this limit is too long for certain.
        limit = 4 * self.options.max_line_chars + 2
        number = offset = 0
        while line := stream.readline(limit):
            number += 1
            place = f":{number}"
            if len(line) == limit and not line.endswith(b"\n"):
                yield self._too_long(place, None)
                while line and not line.endswith(b"\n"):
                    offset += len(line)
                    line = stream.readline(limit)
            elif line.strip():
                yield self._json_line(line, place, offset)
            offset += len(line)
            self.position = raw.tell()
        if offset == 0:
            yield Problem("empty file", self.source.path, "is empty.", fatal=False)

    def _json_line(self, line: bytes, place: str, offset: int) -> Document | Problem:
        text = self._decode(line, place, offset)
        if isinstance(text, Problem):
            return text
        text = text.rstrip("\r\n")
        if len(text) > self.options.max_line_chars:
            return self._too_long(place, len(text))
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            what = f"is no valid JSON ({error}); .jsonl has one JSON object per line."
            return self._problem("bad JSON", place, what)
        key = self.options.json_key
        if not isinstance(record, dict):
            what = f"is a JSON {type(record).__name__} where an object with a key {key!r} is needed."
            return self._problem("missing JSON key", place, what)
        if key not in record:
            there = ", ".join(map(repr, list(record)[:8])) or "none"
            what = f"has no key {key!r} (its keys: {there}); give the right one with --json-key."
            return self._problem("missing JSON key", place, what)
        return self._json_text(record[key], place)

    def _json_text(self, text: object, place: str) -> Document | Problem:
        key = self.options.json_key
        if not isinstance(text, str):
            what = f"has a {type(text).__name__} under {key!r} where a string is needed; see --json-key."
            return self._problem("missing JSON key", place, what)
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            # JSON can spell half of a surrogate pair, which is no character and has no UTF-8 form.
            if self.options.errors != "replace":
                what = f"has the lone surrogate U+{ord(text[error.start]):04X} in its text; {_HOW_TO_GO_ON}"
                return self._problem("undecodable text", place, what)
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            num_bytes = len(text.encode())
        if not text:
            return Problem("empty text", self.source.path + place, f"has an empty {key!r}.", fatal=False)
        return Document(text, num_bytes)

    def _decode(self, data: bytes, place: str, offset: int) -> str | Problem:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            if self.options.errors == "replace":
                return data.decode(errors="replace")
            unpacked = " of the unpacked text" if self.source.is_gzip else ""
            byte = f"byte {offset + error.start}{unpacked} (0x{data[error.start]:02x})"
            return self._problem("undecodable text", place, f"is not UTF-8 at {byte}; {_HOW_TO_GO_ON}")

    def _too_long(self, place: str, length: int | None) -> Problem:
        limit = self.options.max_line_chars
        size = f"of {length} characters, over" if length else "over"
        return self._problem(
            "huge line",
            place,
            f"has a line {size} the limit of {limit}; if it is real text, raise --max-line-chars.",
        )


_HOW_TO_GO_ON = "convert it to UTF-8, or use --errors skip or --errors replace."
