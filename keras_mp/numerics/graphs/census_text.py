"""A census as sentences and tables."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from keras_mp.numerics.graphs import sending, tensor_cores
from keras_mp.numerics.graphs import work as works
from keras_mp.support import text_tables
from keras_mp.support.dtypes import LOW_PRECISION_NAMES

if TYPE_CHECKING:
    from keras_mp.numerics.graphs.census import Cast, Census, Graph, Operation

_NO_LAYER = "outside of layers"

_Item = TypeVar("_Item", "Operation", "Cast")


def sums(pairs: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    """Adds up counts of the same key; the largest sum first."""
    result: Counter[Any] = Counter()
    for key, count in pairs:
        result[key] += count
    return dict(result.most_common())


def lines(census: "Census", most: int | None) -> Iterator[str]:
    """Yields the lines of a `Census`.

    Args:
        census: `Census`.
        most: int. How many rows its tables have at most, in which equal layers of repeated blocks
            are one row; None for all rows.
    """
    yield f"Census of {census.name}" + (f" on a {census.device}" if census.device else "")
    for sentence in _sentences(census):
        yield from text_tables.wrapped(sentence) if most else [sentence]
    yield ""
    rows = [("", "operations", "products", "work", "casts", "bytes cast")]
    for title, graph in (("traced", census.traced), ("runs", census.optimized)):
        if graph is not None:
            rows += list(_rows(title, graph))
    yield from text_tables.aligned(rows)
    yield ""
    total, is_apart = sum(census.runs.work().values()), most is None
    products = [each for each in census.runs.operations if each.work]
    rows = [
        (f"{amount / total:.1%}", dtype, name, why)
        for name, (dtype, why), amount, _ in _grouped(products, _layer, _about, "work", is_apart)
    ]
    yield from _table(("work", "dtype", "layer", "why"), rows, most)
    rows = [
        (_bytes(amount), str(count), source, to, name, why)
        for name, (source, to, why), amount, count in _grouped(
            census.runs.casts, _between, _about_cast, "bytes", is_apart
        )
    ]
    yield from _table(("bytes cast", "casts", "from", "to", "between", "why"), rows, most)


def _grouped(
    items: Iterable[_Item],
    name: Callable[[_Item], str],
    about: Callable[[_Item], tuple[str, ...]],
    amount: str,
    is_apart: bool,
) -> list[tuple[str, tuple[str, ...], int, int]]:
    """Adds up operations or casts of equal layers; the largest sum first.

    Args:
        items: sequence of `Operation` or `Cast`.
        name: called with each; returns the name of its layer.
        about: called with each; returns what else those have in common that are added up.
        amount: str. The attribute that is added up.
        is_apart: bool. Whether layers whose names differ in numbers are left apart.

    Returns:
        list of a name for all of the layers, what they have in common, the sum, and their number.
    """
    groups = text_tables.merged(items, name, lambda each: (about(each), is_apart and name(each)))
    found = [
        (title, about(group[0]), sum(getattr(each, amount) for each in group), len(group))
        for title, group in groups
    ]
    return sorted(found, key=lambda each: each[2], reverse=True)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], most: int | None) -> Iterator[str]:
    """Yields the lines of a table of groups, each of which stays a row of its own."""
    if rows:
        ranked = [text_tables.RankedRow(tuple(row), (-i,), i) for i, row in enumerate(rows)]
        left = [i for i, title in enumerate(header) if title not in ("work", "bytes cast", "casts")]
        yield from text_tables.shortened(header, ranked, most, left, name=left[0])
        yield ""


def _sentences(census: "Census") -> Iterator[str]:
    graph = census.runs
    work = graph.work()
    total = sum(work.values())
    parts = []
    for dtype, count in work.items():
        part = f"{_percent(count / total)} in {dtype}"
        if parts or dtype not in LOW_PRECISION_NAMES:
            products = [e for e in graph.operations if e.dtype == dtype and e.work]
            layers = [each for each, *_ in _grouped(products, _layer, lambda _: (), "work", False)]
            whys = sums((each.why, each.work) for each in products)
            part += f" ({next(iter(whys))}: {', '.join(layers[:3])})"
        parts.append(part)
    if parts:
        yield f"Of the multiplications, {'; '.join(parts)}."
    if graph.casts:
        moved = sum(each.bytes for each in graph.casts)
        places = text_tables.merged(graph.casts, _between)
        where, casts = max(places, key=lambda place: len(place[1]))
        after, _, before = where.partition(" > ")
        place = f"between {after} and {before}" if before else f"in {after}"
        yield (
            f"{len(graph.casts)} cast{'s' * (len(graph.casts) > 1)} move {_bytes(moved)} a call, "
            f"{len(casts)} of them {place}."
        )
    if turning := [each for each in graph.operations if each.is_least]:
        yield (
            "The number of iterations of some loops is unknown. They are counted once: "
            f"{_some(turning)}."
        )
    unknown = [each for each in graph.operations if works.is_counted(each.op) and not each.kind]
    if unknown:
        yield (
            f"The shapes of {len(unknown)} product{'s' * (len(unknown) > 1)} are not known, so "
            f"they are not counted: {_some(unknown)}."
        )
    if census.device is not None:
        yield from tensor_cores.sentences(graph, census.device)
    if census.sending is not None:
        yield from sending.sentences(census.sending)
    if census.optimized is None:
        yield "It is shown as it was traced: XLA compiles it, or grappler fails on it."


def _some(operations: Iterable["Operation"]) -> str:
    """Returns the names of their layers, at most three."""
    names = [*dict.fromkeys(map(_layer, operations))]
    return ", ".join([*names[:3], *([f"{len(names) - 3} more"] if len(names) > 3 else [])])


def _rows(title: str, graph: "Graph") -> Iterator[tuple[str, ...]]:
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


def _layer(operation: "Operation") -> str:
    return operation.layer or _NO_LAYER


def _about(operation: "Operation") -> tuple[str, ...]:
    return operation.dtype, operation.why + " (a loop, counted once)" * operation.is_least


def _between(cast: "Cast") -> str:
    """Returns the names of the layers that a cast is between, or of the one that it is in."""
    after, before = cast.after or _NO_LAYER, cast.before or _NO_LAYER
    return after if after == before else f"{after} > {before}"


def _about_cast(cast: "Cast") -> tuple[str, ...]:
    return cast.source, cast.to, cast.why


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
