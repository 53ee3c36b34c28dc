"""What tuning found, kept below the cache's folder: one small JSON file for each question.

The question is everything the answer depends on: the GPU and its number of SMs, the problem, the scheduler if
it was given, and what the key of a compiled kernel holds (the package's sources, the compiler's version).
A file has the SHA-256 of its contents; one that is not what was written costs a warning and is measured anew.
"""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.table import Table

from cutegemm.cache import cache_dir, warn_caller
from cutegemm.config import GemmConfig
from cutegemm.errors import CutegemmError
from cutegemm.fingerprint import KernelKey, kernel_key
from cutegemm.hardware import Gpu
from cutegemm.problem import GemmProblem
from cutegemm.scheduler import TileScheduler
from cutegemm.scheduler.identity import scheduler_identity
from cutegemm.scheduler.notation import parse_order

_warned_unwritable: set[Path] = set()


@dataclass(frozen=True)
class Winner:
    """The kernel to use, and how it compared; times in microseconds.

    order         of the tiles, as text; None: the question's own scheduler
    splits        CTAs that share a tile's K
    us            of the winner
    heuristic_us  of the heuristic's choice in the same run; None if that failed
    cublas_us     of cuBLAS in the same run
    """

    config: GemmConfig
    order: str | None
    splits: int
    us: float
    heuristic_us: float | None
    cublas_us: float | None
    problem: str
    gpu: str
    created: float

    @property
    def gain(self) -> float | None:
        """How much longer the heuristic's choice takes, as a share of the winner's time; 0 if it won."""
        return None if self.heuristic_us is None else self.heuristic_us / self.us - 1

    def scheduler(self, given: TileScheduler | None) -> TileScheduler:
        """The winner's, where the question's own is ``given``."""
        if given is not None or self.order is None:
            return given or TileScheduler.splitting(self.splits)
        return replace(TileScheduler.splitting(self.splits), order=parse_order(self.order))


class _Damaged(Exception):
    """A file is not what was written; the text is the reason."""


def question(problem: GemmProblem, gpu: Gpu, scheduler: TileScheduler | None) -> KernelKey:
    """The key of a problem on a GPU. Raises as kernel_key and scheduler_identity do."""
    order = "chosen" if scheduler is None else scheduler_identity(scheduler)
    return kernel_key(f"tuned\n{gpu.name}, {gpu.sms} SMs\n{problem!r}\n{order}", gpu.target)


class Winners:
    """The results below one folder. Safe to use from several processes: files appear by a rename."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = cache_dir() if root is None else root
        self._memory: dict[str, Winner] = {}

    @property
    def folder(self) -> Path:
        """Where the files lie; it may not exist yet."""
        return self.root / "tuned"

    def get(self, key: str) -> Winner | None:
        """What was found for a question, None if nothing was or the file is damaged (with a warning)."""
        if key not in self._memory:
            path = self.folder / f"{key}.json"
            try:
                self._memory[key] = _read(path, key)
            except OSError:
                return None  # not there, or not ours to read
            except _Damaged as damage:
                warn_caller(f"the tuning result {path} is damaged ({damage}); it is measured again")
                return None
        return self._memory[key]

    def put(self, key: KernelKey, winner: Winner) -> None:
        """Keeps a result in memory and on disk; where that cannot be written, warns once and goes on."""
        self._memory[key] = winner
        body = {"key": str(key), "question": key.text, "winner": asdict(winner)}
        path = self.folder / f"{key}.json"
        partial = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"sha256": _digest(body), **body}, indent=1), encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            if self.root not in _warned_unwritable:
                _warned_unwritable.add(self.root)
                warn_caller(
                    f"tuning results cannot be kept in {self.folder} ({error}); they are for this process "
                    "only. Free some space, or point CUTEGEMM_CACHE_DIR to a writable folder"
                )

    def entries(self) -> list[Winner]:
        """The readable results on disk, newest first."""
        found = []
        for path in self._files():
            with contextlib.suppress(OSError, _Damaged):
                found.append(_read(path, path.stem))
        return sorted(found, key=lambda winner: winner.created, reverse=True)

    def clear(self) -> int:
        """Removes every result, on disk and in memory; their number."""
        self._memory.clear()
        removed = 0
        for path in self._files():
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        return removed

    def _files(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if path.suffix in (".json", ".tmp"))
        except (FileNotFoundError, NotADirectoryError):
            return []


def winners_table(winners: Sequence[Winner], title: str = "tuned") -> Table:
    """A line for each shape: the winner, its time, what it gains over the heuristic's choice and cuBLAS."""
    table = Table(title=title, title_justify="left")
    for head in ("problem", "kernel"):
        table.add_column(head)
    for head in ("us", "heuristic us", "gain", "times cuBLAS"):
        table.add_column(head, justify="right")
    for winner in winners:
        table.add_row(
            winner.problem,
            kernel_name(winner),
            f"{winner.us:.2f}",
            _number(winner.heuristic_us, ".2f"),
            "-" if winner.gain is None else f"{100 * winner.gain:.1f} %",
            _number(None if winner.cublas_us is None else winner.cublas_us / winner.us, ".3f"),
        )
    gains = [1 + winner.gain for winner in winners if winner.gain is not None]
    ratios = [winner.cublas_us / winner.us for winner in winners if winner.cublas_us is not None]
    if len(winners) > 1 and gains:
        table.add_section()
        gain = f"{100 * (geometric_mean(gains) - 1):.1f} %"
        table.add_row("geomean", "", "", "", gain, f"{geometric_mean(ratios):.3f}" if ratios else "-")
    return table


def kernel_name(winner: Winner) -> str:
    """Configuration, split and order in words."""
    words = [str(winner.config)]
    if winner.splits > 1:
        words.append(f"K split {winner.splits} ways")
    if winner.order is not None and winner.order != repr(TileScheduler().order):
        words.append(winner.order)
    return ", ".join(words)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read(path: Path, key: str) -> Winner:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        body = json.loads(text)
        if body.pop("sha256") != _digest(body):
            raise _Damaged("its contents are not what was written")
        if body["key"] != key:
            raise _Damaged("it answers another question")
        fields = dict(body["winner"])
        winner = Winner(config=GemmConfig(**fields.pop("config")), **fields)
        winner.scheduler(None)
        return winner
    except (ValueError, KeyError, TypeError, AttributeError, CutegemmError) as error:
        raise _Damaged("it cannot be understood") from error
