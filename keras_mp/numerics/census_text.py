"""A census as sentences and tables."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from keras_mp.numerics import tensor_cores
from keras_mp.numerics import work as works
from keras_mp.support import text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

NO_LAYER = "outside of layers"

# So many rows a table has at most.
_MOST = 12


def sums(pairs: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    """Adds up counts of the same key; the largest sum first."""
    result: Counter[Any] = Counter()
    for key, count in pairs:
        result[key] += count
    return dict(result.most_common())


def lines(of: Any) -> Iterator[str]:
    """Yields the lines of a `Census`."""
    yield f"Census of {of.of}" + (f" on a {of.device}" if of.device else "")
    yield from _sentences(of)
    yield ""
    rows = [("", "operations", "products", "work", "casts", "bytes cast")]
    for title, graph in (("traced", of.traced), ("runs", of.optimized)):
        if graph is not None:
            rows += list(_rows(title, graph))
    yield from text_tables.aligned(rows)
    yield ""
    work = sums((_about(each), each.work) for each in of.runs.operations if each.work)
    if work:
        total = sum(work.values())
        rows = [("work", "dtype", "layer", "why")]
        rows += [(f"{n / total:.1%}", *key) for key, n in list(work.items())[:_MOST]]
        yield from text_tables.aligned(rows, left=(1, 2, 3))
        yield from _more(len(work))
        yield ""
    bytes_of = sums((_between(each), each.bytes) for each in of.runs.casts)
    if bytes_of:
        counts = Counter(map(_between, of.runs.casts))
        rows = [("bytes cast", "casts", "from", "to", "between", "why")]
        for key, n in list(bytes_of.items())[:_MOST]:
            source, to, after, before, why = key
            rows.append((_bytes(n), str(counts[key]), source, to, f"{after} > {before}", why))
        yield from text_tables.aligned(rows, left=(2, 3, 4, 5))
        yield from _more(len(bytes_of))


def _more(count: int) -> Iterator[str]:
    if count > _MOST:
        yield f"... and {count - _MOST} more"


def _sentences(of: Any) -> Iterator[str]:
    graph = of.runs
    work = graph.work()
    total = sum(work.values())
    parts = []
    for dtype, count in work.items():
        part = f"{_percent(count / total)} in {dtype}"
        if parts or dtype not in LOW_PRECISION_NAMES:
            products = [e for e in graph.operations if e.dtype == dtype and e.work]
            layers = sums((each.layer or NO_LAYER, each.work) for each in products)
            whys = sums((each.why, each.work) for each in products)
            part += f" ({next(iter(whys))}: {', '.join(list(layers)[:3])})"
        parts.append(part)
    if parts:
        yield f"Of the multiplications, {'; '.join(parts)}."
    if graph.casts:
        moved = sum(each.bytes for each in graph.casts)
        where = Counter((c.after or NO_LAYER, c.before or NO_LAYER) for c in graph.casts)
        (after, before), most = where.most_common(1)[0]
        between = f"in {after}" if after == before else f"between {after} and {before}"
        yield (
            f"{len(graph.casts)} cast{'s' * (len(graph.casts) > 1)} move {_bytes(moved)} a call, "
            f"{most} of them {between}."
        )
    turning = dict.fromkeys(each.layer or NO_LAYER for each in graph.operations if each.is_least)
    if turning:
        yield f"Nothing tells how often some loops turn. They are counted once: {_some(turning)}."
    unknown = [each for each in graph.operations if works.is_counted(each.op) and not each.kind]
    if unknown:
        places = dict.fromkeys(each.layer or NO_LAYER for each in unknown)
        yield (
            f"The shapes of {len(unknown)} product{'s' * (len(unknown) > 1)} are not known, so "
            f"that they count nothing: {_some(places)}."
        )
    if of.device is not None:
        yield from tensor_cores.sentences(graph, of.device)
    if of.optimized is None:
        yield "XLA compiles it: it is shown as it was traced, and XLA may leave casts out."


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join([*shown[:3], *([f"{len(shown) - 3} more"] if len(shown) > 3 else [])])


def _rows(title: str, graph: Any) -> Iterator[tuple[str, ...]]:
    work, operations = graph.work(), graph.operations_by_dtype()
    products = sums((e.dtype, e.turns) for e in graph.operations if e.work)
    casts = sums((each.to, 1) for each in graph.casts)
    moved = sums((each.to, each.bytes) for each in graph.casts)
    for dtype in dict.fromkeys([*work, *operations, *casts]):
        yield (
            f"{title}, {dtype}",
            f"{operations.get(dtype, 0):,}",
            f"{products.get(dtype, 0):,}",
            _scaled(work.get(dtype, 0), "FLOP"),
            f"{casts.get(dtype, 0):,}",
            _bytes(moved.get(dtype, 0)),
        )


def _about(operation: Any) -> tuple[str, ...]:
    why = operation.why + " (a loop, counted once)" * operation.is_least
    return operation.dtype, operation.layer or NO_LAYER, why


def _between(cast: Any) -> tuple[str, ...]:
    return cast.source, cast.to, cast.after or NO_LAYER, cast.before or NO_LAYER, cast.why


def _percent(share: float) -> str:
    return f"{share:.0%}" if 0.01 <= share <= 0.99 or share == 1 else f"{share:.2%}"


def _bytes(count: int) -> str:
    return _scaled(count, "B")


def _scaled(count: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    return f"{count:,.3g} T{unit}"
