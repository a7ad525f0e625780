"""What a run found, kept in one JSON file that grows row by row: a run that is killed keeps its rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tilefold.errors import TilefoldError

#: Changes when the meaning of a field does.
VERSION = 1


@dataclass(frozen=True, slots=True)
class Record:
    """One contender on one row.

    `microseconds`: the median of each repetition (one entry where it was not timed in rounds), empty
    where it was not timed; `spread`: between the quartiles of its rounds, over the median. `over_ours`:
    its time over Tilefold's in each repetition (the median of the rounds' own ratios), above 1 where
    Tilefold is faster. `error` and `eager_error` are relative to float64, on the same parts. `first_call`:
    seconds until the first result, compilation included; `first_cpu`: of the processor, of this process and of
    those that it waited for, meanwhile. `peak_bytes`: allocated by a call at most; `kernels`: launches in its graph
    (NaN where it has none). `step_us`: of a plain call, `host_us`: until it returns, where that is asked for.
    `why`: what went wrong, "" if nothing did. `left`: operators and parts of graphs that Tilefold left to
    others, "" if none; `left_why`: the same, each with its reason. `commit`: of Tilefold, "" where it was not noted.
    """

    suite: str
    row: str
    family: str
    shape: str
    length: int
    contender: str
    kind: str
    floor_us: float = math.nan
    bound_by: str = ""
    flops: float = 0.0
    nbytes: float = 0.0
    error: float = math.nan
    eager_error: float = math.nan
    microseconds: tuple[float, ...] = ()
    spread: float = math.nan
    over_ours: tuple[float, ...] = ()
    ratio: float = math.nan
    first_call: float = math.nan
    first_cpu: float = math.nan
    peak_bytes: float = math.nan
    kernels: float = math.nan
    step_us: float = math.nan
    host_us: float = math.nan
    how: str = ""
    why: str = ""
    left: str = ""
    left_why: str = ""
    commit: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.suite, self.row

    @property
    def best_us(self) -> float:
        """The smaller of the repetitions' medians; NaN where it was not timed."""
        return min(self.microseconds, default=math.nan)


@dataclass(frozen=True, slots=True)
class Results:
    """A file of results. `device` and `versions` say where; `policy` how; `date` (ISO) when it last grew.

    `done`: rows that are finished (suite, row). `numerics`, `ablations`, `startup`: entries of those studies.
    """

    device: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    date: str = ""
    records: tuple[Record, ...] = ()
    done: tuple[tuple[str, str], ...] = ()
    numerics: tuple[dict[str, Any], ...] = ()
    ablations: tuple[dict[str, Any], ...] = ()
    startup: tuple[dict[str, Any], ...] = ()

    def row(self, suite: str, row: str) -> tuple[Record, ...]:
        """The records of a row."""
        return tuple(r for r in self.records if r.key == (suite, row))

    def entries(self, study: str) -> tuple[dict[str, Any], ...]:
        """What the file has of a study."""
        found: tuple[dict[str, Any], ...] = getattr(self, study)
        return found

    def afresh(self, study: str) -> Results:
        """Without what is known of a study."""
        nothing: dict[str, Any] = {study: ()}
        return replace(self, **nothing)

    def studied(self, study: str, entries: Iterable[dict[str, Any]]) -> Results:
        """With more entries of a study."""
        more: dict[str, Any] = {study: (*self.entries(study), *entries)}
        return replace(self, **more)

    def without(self, rows: Iterable[tuple[str, str]]) -> Results:
        """The rest, where these rows are to be measured again."""
        gone = set(rows)
        kept = tuple(r for r in self.records if r.key not in gone)
        return replace(self, records=kept, done=tuple(d for d in self.done if d not in gone))

    def finished(self, key: tuple[str, str], records: Sequence[Record]) -> Results:
        """With a row's records, in place of what was known of it."""
        rest = self.without([key])
        return replace(rest, records=(*rest.records, *records), done=(*rest.done, key))

    def of_one_commit(self, suite: str) -> tuple[Results, str, tuple[str, ...]]:
        """Without the suite's rows of other commits than the last one measured; that commit, and the rows' names."""
        mine = [r for r in self.records if r.suite == suite]
        if not mine:
            return self, "", ()
        last = mine[-1].commit
        older = tuple(dict.fromkeys(r.row for r in mine if r.commit != last))
        return self.without((suite, row) for row in older), last, older

    def failed(self, record: Record) -> Results:
        """With what is known of one contender (its process died), the row not being finished."""
        rest = tuple(r for r in self.records if (r.key, r.contender) != (record.key, record.contender))
        return replace(self, records=(*rest, record))


def save(results: Results, path: Path) -> None:
    """Write atomically: a reader, or a run that is killed, never sees half a file. NaN becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"version": VERSION, **{f.name: getattr(results, f.name) for f in fields(Results)}}
    data["records"] = [asdict(r) for r in results.records]
    whole = path.with_name(path.name + ".new")
    whole.write_text(_layout(_plain(data)), encoding="utf-8")
    whole.replace(path)


def load(path: Path) -> Results:
    """Read what `save` wrote; an absent file is an empty one. TilefoldError where it is something else."""
    if not path.is_file():
        return Results()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = data.pop("version")
        records = tuple(_record(r) for r in data.pop("records"))
        done = tuple((str(s), str(r)) for s, r in data.pop("done"))
        numerics, ablations, startup = (tuple(data.pop(name)) for name in ("numerics", "ablations", "startup"))
        found = Results(records=records, done=done, numerics=numerics, ablations=ablations, startup=startup, **data)
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise TilefoldError(f"not a file of results: {path} ({error})", hint="choose another --json") from None
    if version != VERSION:
        raise TilefoldError(f"{path} has version {version} of the format, not {VERSION}", hint="choose another --json")
    return found


def load_all(folder: Path) -> tuple[Results, ...]:
    """The results of every device in a folder; dry runs, which are no device's, left out."""
    found = (load(path) for path in sorted(folder.glob("*.json")))
    return tuple(r for r in found if "multiprocessors" in r.device)


def _record(data: dict[str, Any]) -> Record:
    values: dict[str, Any] = {
        k: math.nan if v is None else tuple(v) if isinstance(v, list) else v for k, v in data.items()
    }
    return Record(**values)


def _plain(x: object) -> object:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    return x


def _layout(data: object) -> str:
    """JSON with one entry of each list a line, so that differences between two runs can be read."""
    assert isinstance(data, dict)
    parts = []
    for name, value in data.items():
        if isinstance(value, list) and value:
            inner = ",\n".join("    " + json.dumps(v) for v in value)
            parts.append(f"  {json.dumps(name)}: [\n{inner}\n  ]")
        else:
            parts.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
