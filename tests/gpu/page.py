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
    yield from _machine(found["machine"])
    yield ""
    yield from _promises(found["promises"])
    yield ""
    yield from _kernels(found["kernels"])
    yield ""
    yield from _speeds(found["speeds"])
    if found["quick"]:
        yield "Models were too small to tell a speed: this was a quick check."
        return
    yield ""
    yield from _steps(found["steps"])


def _machine(machine: Mapping[str, Any]) -> Iterator[str]:
    yield from text_tables.wrapped(
        f"keras_mp {machine['keras_mp']}, TensorFlow {machine['tensorflow']}, {machine['keras']}, "
        f"Python {machine['python']}, {machine['system']}"
    )
    units, used = (
        ", ".join(machine[name]) or "none" for name in ("cpu_units", "cpu_units_of_onednn")
    )
    cpu = f"{machine['cpu']}, {machine['threads']} threads; 16-bit units: {units}; used: {used}"
    yield from text_tables.wrapped(f"CPU: {cpu}")
    if not machine["gpus"]:
        yield "No GPU was seen."
        return
    for gpu in machine["gpus"]:
        capability = ".".join(map(str, gpu["compute_capability"] or ["unknown"]))
        yield f"GPU: {gpu['name']}, compute capability {capability}"
    libraries = [
        f"{name} {machine[key] or 'unknown'}"
        for name, key in (("driver", "driver"), ("CUDA", "cuda"), ("cuDNN", "cudnn"))
    ]
    tensor_float_32 = "on" if machine["tensor_float_32"] else "off"
    yield f"{', '.join(libraries)}; TensorFloat-32 {tensor_float_32}"


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
        ("ms of a batch", "float32", "float16,", "float16,", "bfloat16,", "bfloat16,"),
        ("(times float32)", "", "Keras's own", "keras_mp", "Keras's own", "keras_mp"),
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
