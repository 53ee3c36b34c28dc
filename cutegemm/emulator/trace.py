"""What ran when, in emulated order, with the cycles of a simple cost model; as data and for Perfetto."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """One step of a warp or of an engine that works for it.

    kind        "load", "mma", "store" or "wait"
    engine      "TMA load", "tensor core", "TMA store", or "" for the warp itself
    begin, end  cycles of the cost model
    """

    kind: str
    engine: str
    detail: str
    cta: int
    warp: int
    role: str
    begin: int
    end: int

    @property
    def lane(self) -> str:
        """The row of a timeline it belongs to."""
        who = f"{self.role} warp {self.warp}".strip()
        return f"{self.engine} for {who}" if self.engine else who


@dataclass
class Trace:
    """Events in the order in which they were emulated."""

    events: list[Event] = field(default_factory=list)

    def add(self, warp: Any, kind: str, detail: str, begin: int, end: int, engine: str = "") -> None:
        """Appends an event of a warp."""
        self.events.append(Event(kind, engine, detail, warp.cta.number, warp.index, warp.role, begin, end))

    @property
    def cycles(self) -> int:
        """When the last event ended."""
        return max((event.end for event in self.events), default=0)

    def lanes(self, cta: int | None = None) -> dict[tuple[int, str], list[Event]]:
        """Events by CTA and lane, of one CTA or of all."""
        found: dict[tuple[int, str], list[Event]] = {}
        for event in self.events:
            if cta is None or event.cta == cta:
                found.setdefault((event.cta, event.lane), []).append(event)
        return found

    def chrome(self) -> dict[str, Any]:
        """The trace in the Chrome trace format: a process for each CTA, a thread for each lane, in cycles."""
        rows: list[dict[str, Any]] = []
        for number, ((cta, lane), events) in enumerate(sorted(self.lanes().items())):
            rows.append({"ph": "M", "name": "process_name", "pid": cta, "args": {"name": f"CTA {cta}"}})
            rows.append({"ph": "M", "name": "thread_name", "pid": cta, "tid": number, "args": {"name": lane}})
            rows += [
                {
                    "ph": "X",
                    "name": event.kind,
                    "pid": cta,
                    "tid": number,
                    "ts": event.begin,
                    "dur": max(1, event.end - event.begin),
                    "args": {"detail": event.detail},
                }
                for event in events
            ]
        return {"traceEvents": rows, "displayTimeUnit": "ns"}

    def write_chrome(self, path: str | Path) -> None:
        """Writes the Chrome trace; open it in Perfetto or chrome://tracing."""
        Path(path).write_text(json.dumps(self.chrome()), encoding="utf-8")
