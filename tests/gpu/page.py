"""The page that a check prints."""

from collections.abc import Iterator, Mapping
from typing import Any

from keras_mp.hardware.stopwatch import DTYPES
from keras_mp.support import text_tables
from tests.gpu.steps import VARIANTS


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of the page, none longer than `text_tables.WIDTH`.

    Args:
        found: what `gpu.check` returned.
    """
    for line in found["machine"]:
        yield from text_tables.wrapped(line)
    yield ""
    yield from _promises(found["promises"])
    yield ""
    yield from _kernels(found["kernels"])
    if found["quick"]:
        yield "Sizes were too small to tell a speed: this was a quick check."
        return
    yield ""
    yield from _speeds(found["speeds"])
    yield ""
    yield from _steps(found["steps"])


def _promises(promises: list[Mapping[str, Any]]) -> Iterator[str]:
    width = max(len(each["name"]) for each in promises)
    for each in promises:
        start = f"{'kept' if each['kept'] else 'BROKEN':6}  {each['name']:{width}}  "
        yield from text_tables.wrapped(start + each["figure"], " " * len(start))
    kept = sum(each["kept"] for each in promises)
    yield f"{kept} of {len(promises)} promises are kept."


def _kernels(kernels: list[Mapping[str, Any]]) -> Iterator[str]:
    for dtype in ("bfloat16", "float16"):
        of_dtype = [each for each in kernels if each["dtype"] == dtype]
        wrong = {each["op"]: None for each in of_dtype if each["own_is_wrong"]}
        names = ", ".join(wrong) or "none"
        yield from text_tables.wrapped(
            f"TensorFlow's own kernels that are wrong here in {dtype}: {names}."
        )


def _speeds(speeds: Mapping[str, Mapping[str, float]] | None) -> Iterator[str]:
    if speeds is None:
        yield "This device has no kernel for a product or a convolution in one of the dtypes."
        return
    rows: list[tuple[str, ...]] = [("GF/s (times float32)", *DTYPES)]
    for name, by_dtype in speeds.items():
        cells = (
            f"{by_dtype[d] / 1e9:,.4g} ({by_dtype[d] / by_dtype['float32']:.2f})" for d in DTYPES
        )
        rows.append((name, *cells))
    yield from text_tables.aligned(rows)


def _steps(steps: Mapping[str, Any]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [
        ("ms of a batch", "float32", "float16", "bfloat16", "float16,", "bfloat16,"),
        ("(times float32)", "", "", "", "Keras's own", "Keras's own"),
    ]
    for model, of_model in steps.items():
        if isinstance(of_model, str):  # What it raised is among the promises.
            continue
        for what, seconds in of_model.items():
            cells = (
                f"{seconds[each] * 1e3:.3g} ({seconds[each] / seconds['float32']:.2f})"
                for each in VARIANTS
            )
            rows.append((f"{model}, {what}", *cells))
    yield from text_tables.aligned(rows)
