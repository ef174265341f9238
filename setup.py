"""Packaging of keras_mp."""

import pathlib
import re

import setuptools

_ROOT = pathlib.Path(__file__).parent
_VERSION = re.search(
    r'__version__ = "(.+)"', (_ROOT / "keras_mp" / "_version.py").read_text()
).group(1)

# Where the files are that the README points at, without a slash at the end. As long as the project
# has no public address, links to them are plain text on the package index rather than dead.
_REPOSITORY = ""


def _long_description() -> str:
    """The README as it reads away from the repository."""
    parts = re.split(r"(^```.*?^```$)", (_ROOT / "README.md").read_text(), flags=re.M | re.S)
    parts[::2] = [
        re.sub(r"(!?)\[([^]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", _absolute_link, text)
        for text in parts[::2]
    ]
    return "".join(parts)


def _absolute_link(link: re.Match) -> str:
    mark, text, path = link.groups()
    if not _REPOSITORY:
        return text
    kind = "raw" if mark else "blob"
    return f"{mark}[{text}]({_REPOSITORY}/{kind}/v{_VERSION}/{path})"


# No upper bounds: without a private name that a release has moved, only its feature is off.
_TENSORFLOW_VERSIONS = ">=2.16"
# TensorFlow brings Keras 3 in any case, but any of it. Who uses tf_keras does not import it.
_KERAS_VERSIONS = ">=3.12"
_LEGACY = [f"tf_keras{_TENSORFLOW_VERSIONS}"]
_DIGITS = ["matplotlib", "scikit-learn"]
# Whose data `benchmarks parity` trains on.
_PARITY = [*_DIGITS, "statsmodels"]
# TensorFlow 2.21 no longer brings tensorboard, which tf.summary needs.
_TUTORIALS = [*_DIGITS, "ipykernel", "nbclient", "tensorboard"]
# As in benchmarks/gpu_compiler.txt: for an environment of its own, without TensorFlow.
_GPU_COMPILER = [
    "jax==0.10.2",
    "jax-cuda12-plugin==0.10.2",
    "nvidia-cuda-nvcc-cu12==12.9.86",
    "libtpu==0.0.52",
]
_DOCS = ["myst-parser", "sphinx"]

setuptools.setup(
    name="keras-mp",
    version=_VERSION,
    description="Mixed precision training for tf.keras, on Keras 3 and on Keras 2",
    long_description=_long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=setuptools.find_packages(include=["keras_mp", "keras_mp.*"]),
    package_data={"keras_mp": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[
        f"tensorflow{_TENSORFLOW_VERSIONS}",
        f"keras{_KERAS_VERSIONS}",
        "numpy",
        "absl-py",
    ],
    # Where file names ignore case, a folder `build` could not stand beside Bazel's file `BUILD`.
    options={"build": {"build_base": ".build"}},
    extras_require={
        "legacy": _LEGACY,
        "gpu": [f"tensorflow[and-cuda]{_TENSORFLOW_VERSIONS}"],
        "tutorials": _TUTORIALS,
        "docs": _DOCS,
        "gpu-compiler": _GPU_COMPILER,
        "bench": [*_PARITY, *_LEGACY, "torch"],
        # Hugging Face's models for TensorFlow, which are made with tf_keras, end with version 4.
        # Those libraries that cannot be resolved with TensorFlow's version are named in
        # benchmarks/acceptance/third_party_programs.py.
        "third-party": [
            *_LEGACY,
            "bayesflow",
            "dm-sonnet",
            "keras-hub",
            "keras-rs",
            "keras-tuner",
            "tensorflow-model-optimization",
            "tensorflow-probability",
            "transformers<5",
        ],
        "test": [
            *_TUTORIALS,
            *_DOCS,
            *_LEGACY,
            *_PARITY,
            "coverage>=7.10",
            "pyright[nodejs]",
            "pytest>=8",
            "pytest-xdist",
            "ruff",
        ],
    },
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
