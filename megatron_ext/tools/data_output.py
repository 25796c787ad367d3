"""The files of one corpus: written under temporary names, then published, recognised later by a manifest."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_ext.tools.data_errors import DataError

SCHEMA = 1
State = Literal["absent", "incomplete", "current", "different"]


@dataclass(frozen=True)
class Output:
    """Paths that belong to `--output PREFIX`."""

    prefix: str

    @property
    def dataset(self) -> str:
        """What Megatron's --data-path takes."""
        return f"{self.prefix}_text_document"

    @property
    def model(self) -> Path:
        return Path(f"{self.prefix}.model")

    @property
    def manifest(self) -> Path:
        return Path(f"{self.prefix}.json")

    @property
    def bin(self) -> Path:
        return Path(f"{self.dataset}.bin")

    @property
    def idx(self) -> Path:
        return Path(f"{self.dataset}.idx")

    @property
    def lock(self) -> Path:
        return Path(f"{self.prefix}.lock")

    @property
    def files(self) -> tuple[Path, ...]:
        """In the order of publication: with a manifest but no index, a corpus is known to be incomplete."""
        return (self.manifest, self.model, self.bin, self.idx)


def temporary(path: Path) -> Path:
    """Where `path` is written before it is complete; the same folder, so that renaming is atomic."""
    return path.with_name(path.name + ".tmp")


def sha256(path: str | Path) -> str:
    """Hexadecimal digest of a file."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def inspect(output: Output, request: dict[str, Any]) -> tuple[State, dict[str, Any]]:
    """Compare what is there with what is asked for.

    Returns:
        The state, and the manifest (empty if there is none that can be read).
    """
    present = [path for path in output.files if path.exists()]
    if not present:
        return "absent", {}
    try:
        manifest = json.loads(output.manifest.read_text())
    except (OSError, ValueError):
        return "different", {}
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        return "different", {}
    if not output.idx.exists():
        return "incomplete", manifest
    result = manifest["result"]
    intact = (
        output.bin.exists()
        and output.bin.stat().st_size == result["bin_bytes"]
        and output.idx.stat().st_size == result["idx_bytes"]
        and Path(result["model"]).is_file()
        and sha256(result["model"]) == result["model_sha256"]
    )
    return ("current" if intact and manifest["request"] == request else "different"), manifest


def refuse(output: Output, request: dict[str, Any], manifest: dict[str, Any]) -> DataError:
    """The error for an output that is there and is not what is asked for."""
    if not manifest:
        names = ", ".join(str(path) for path in output.files if path.exists())
        why = f"there are files of that name ({names}) without a manifest of this tool"
    else:
        changed = [key for key in request if manifest["request"].get(key) != request[key]]
        why = f"it was made with other {' and '.join(changed)}" if changed else "its files were changed since"
    return DataError(
        f"--output {output.prefix} exists and {why}; use --force to replace it, or another --output."
    )


@contextlib.contextmanager
def locked(output: Output) -> Iterator[None]:
    """Own the output for a while: makes its folder, keeps a second writer out, removes temporaries around it.

    Raises:
        DataError: the folder cannot be made or written, or another process is writing this output.
    """
    folder = output.lock.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(output.lock, "a")  # noqa: SIM115
    except OSError as error:
        raise DataError(
            f"--output {output.prefix} cannot be written: {error.strerror} ({error.filename}); choose a "
            "prefix in a folder you may write to."
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another process is writing --output {output.prefix}; wait for it, or use another --output."
            ) from error
        try:
            remove_temporaries(output)
            yield
        finally:
            remove_temporaries(output)
            output.lock.unlink(missing_ok=True)


def remove_temporaries(output: Output) -> None:
    """Delete what an interrupted run left."""
    for path in output.files:
        temporary(path).unlink(missing_ok=True)


def publish(output: Output, manifest: dict[str, Any]) -> bool:
    """Rename the temporaries into place, the index last, so that a crash leaves no valid-looking mixture.

    Megatron keeps shuffling indices in a folder named as the dataset and does not notice new data under the
    old name, so that folder goes too.

    Returns:
        Whether there was such a cache.
    """
    temporary(output.manifest).write_text(json.dumps(manifest, indent=1) + "\n")
    output.idx.unlink(missing_ok=True)
    cache = Path(output.dataset) / "cache"
    had_cache = cache.is_dir()
    if had_cache:
        shutil.rmtree(cache)
    for path in output.files:
        if temporary(path).exists():
            os.replace(temporary(path), path)
    return had_cache
