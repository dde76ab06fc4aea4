"""Real text as bytes: what to read, how to split it, and which sequences a step trains on.

The order of the data is a pure function of the seed and the step. A step draws ``sequences``
starting points for all ranks. Each microbatch takes a consecutive part of them, and each rank a
consecutive part of the microbatch. The global batch does not depend on the numbers of ranks and of
microbatches, so a run that is resumed on other ranks continues the same loss curve.

Worked example, a step of 8 sequences in 2 microbatches on 2 ranks:

    sequence      0  1  2  3  4  5  6  7
    microbatch    0  0  0  0  1  1  1  1
    rank          0  0  1  1  0  0  1  1
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB_SIZE = 256  # a token is a byte
# The approximate fraction of the files that is held out.
HELD_OUT_FRACTION = 0.1
# Folders without text of their own, and tests, which are half of the standard library.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", ".git", "test", "tests", "idle_test"}
)
MAX_FILE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Corpus:
    """Two 1-D uint8 tensors of text, each the concatenation of whole files."""

    train: torch.Tensor
    held_out: torch.Tensor
    num_train_files: int
    num_held_out_files: int

    def __str__(self) -> str:
        return (
            f"{self.train.numel():,} bytes in {self.num_train_files} files to train on, "
            f"{self.held_out.numel():,} bytes in {self.num_held_out_files} files held out"
        )


@dataclass(frozen=True)
class Batch:
    """Sequences of one microbatch on one rank: ``tokens`` and ``targets``, int64 ``[batch, seq]``.

    ``targets[i, t]`` is the byte after ``tokens[i, t]``.
    """

    tokens: torch.Tensor
    targets: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``."""
        return Batch(self.tokens.to(device), self.targets.to(device))


def standard_library() -> Path:
    """The folder with the source of Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def text_files(folder: Path, pattern: str = "*") -> list[Path]:
    """Text files below ``folder`` by their sorted relative paths; binary files are left out.

    Raises:
        ValueError: ``folder`` is not a folder.
    """
    if not folder.is_dir():
        raise ValueError(f"data: expected a folder; found {str(folder)!r}")
    found = []
    for path in folder.rglob(pattern):
        parts = path.relative_to(folder).parts
        if SKIPPED_FOLDERS.isdisjoint(parts[:-1]) and path.is_file():
            found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def hash_fraction(relative_path: str) -> float:
    """A number in [0, 1) that depends on nothing but ``relative_path``."""
    digest = hashlib.blake2b(relative_path.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56


def split_by_file(names: list[str], fraction: float = HELD_OUT_FRACTION) -> set[str]:
    """The names to hold out: those that hash below ``fraction``.

    Neither part is empty: if one would be, the name with the nearest hash is moved to it.

    Raises:
        ValueError: fewer than two names.
    """
    if len(names) < 2:
        raise ValueError(f"data: expected at least 2 text files; found {len(names)}")
    held_out = {name for name in names if hash_fraction(name) < fraction}
    if not held_out:
        held_out.add(min(names, key=hash_fraction))
    elif len(held_out) == len(names):
        held_out.remove(max(names, key=hash_fraction))
    return held_out


def read_corpus(folder: Path | None = None) -> Corpus:
    """Text of ``folder``; by default that of Python's standard library, its ``*.py`` files.

    Raises:
        ValueError: ``folder`` is not a folder, or holds fewer than two text files.
    """
    root, pattern = (standard_library(), "*.py") if folder is None else (folder, "*")
    texts: dict[str, bytes] = {}
    for path in text_files(root, pattern):
        if path.stat().st_size > MAX_FILE_BYTES:
            continue
        content = path.read_bytes()
        if content and b"\0" not in content:
            texts[path.relative_to(root).as_posix()] = content
    held_out = split_by_file(list(texts))
    train = [name for name in texts if name not in held_out]
    return Corpus(
        train=_as_tensor([texts[name] for name in train]),
        held_out=_as_tensor([texts[name] for name in texts if name in held_out]),
        num_train_files=len(train),
        num_held_out_files=len(held_out),
    )


def _as_tensor(texts: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)


def batch_starts(
    num_bytes: int, sequence_length: int, count: int, step: int, seed: int
) -> list[int]:
    """Where the ``count`` sequences of ``step`` begin, over all microbatches and ranks.

    Raises:
        ValueError: the text is shorter than one sequence and its last target.
    """
    room = num_bytes - sequence_length
    if room < 1:
        raise ValueError(
            f"sequence_length: expected less than the text's {num_bytes} bytes; "
            f"found {sequence_length}"
        )
    digest = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    starts: list[int] = torch.randint(room, (count,), generator=generator).tolist()
    return starts


def gather_sequences(text: torch.Tensor, starts: list[int], sequence_length: int) -> Batch:
    """The sequences of ``text`` at ``starts``."""
    index = torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(sequence_length + 1)
    rows = text[index].long()
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


@dataclass(frozen=True)
class BatchPlan:
    """How the global batch of a step is divided.

    A microbatch has ``batch_size`` sequences over all ranks. A step has ``num_microbatches``.

    Raises:
        ValueError: ``batch_size`` is not a multiple of ``num_ranks``.
    """

    batch_size: int
    num_microbatches: int
    num_ranks: int
    sequence_length: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size % self.num_ranks:
            raise ValueError(
                f"batch_size: expected a multiple of the {self.num_ranks} ranks; "
                f"found {self.batch_size}"
            )

    def train_batch(self, text: torch.Tensor, step: int, microbatch: int, rank: int) -> Batch:
        """The sequences of ``text`` for one rank in one microbatch of one step."""
        count = self.batch_size * self.num_microbatches
        starts = batch_starts(text.numel(), self.sequence_length, count, step, self.seed)
        return gather_sequences(text, self._part(starts, microbatch, rank), self.sequence_length)

    def held_out_starts(self, text: torch.Tensor, num_batches: int) -> list[int]:
        """Starts of ``num_batches * batch_size`` sequences, spread evenly over ``text``."""
        count = num_batches * self.batch_size
        room = text.numel() - self.sequence_length
        if room < 1:
            raise ValueError(
                f"sequence_length: expected less than the held-out text's {text.numel()} bytes; "
                f"found {self.sequence_length}"
            )
        return [index * room // count for index in range(count)]

    def held_out_batch(self, text: torch.Tensor, num_batches: int, index: int, rank: int) -> Batch:
        """Returns a rank's part of one of ``num_batches`` batches, spread evenly over ``text``."""
        starts = self.held_out_starts(text, num_batches)
        return gather_sequences(text, self._part(starts, index, rank), self.sequence_length)

    def _part(self, starts: list[int], microbatch: int, rank: int) -> list[int]:
        local = self.batch_size // self.num_ranks
        first = microbatch * self.batch_size + rank * local
        return starts[first : first + local]


def bigram_cross_entropy(
    train: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor, smoothing: float = 1.0
) -> float:
    """Mean of ``-ln p(target | token)`` in nats a byte, for a bigram model counted on ``train``.

    ``p(b | a) = (count(a, b) + smoothing) / (count(a) + 256 * smoothing)``: Laplace's add-one rule.
    """
    pairs = train[:-1].long() * VOCAB_SIZE + train[1:].long()
    counts = torch.bincount(pairs, minlength=VOCAB_SIZE**2).double().view(VOCAB_SIZE, VOCAB_SIZE)
    counts += smoothing
    log_p = counts.log() - counts.sum(dim=1, keepdim=True).log()
    return -float(log_p[tokens.flatten(), targets.flatten()].mean())


def printable(text: bytes) -> str:
    """Returns generated bytes as text for a terminal: other control characters than line breaks,
    and bytes that are not UTF-8, are replaced."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in decoded)
