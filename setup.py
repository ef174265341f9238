"""Packaging of keras_mp."""

import pathlib
import re

import setuptools

_ROOT = pathlib.Path(__file__).parent
_VERSION = re.search(
    r'__version__ = "(.+)"', (_ROOT / "keras_mp" / "_version.py").read_text()
).group(1)

_TENSORFLOW_VERSIONS = ">=2.16,<2.22"
_LEGACY = [f"tf_keras{_TENSORFLOW_VERSIONS}"]
_DIGITS = ["matplotlib", "scikit-learn"]
# TensorFlow 2.21 no longer brings tensorboard, which tf.summary needs.
_TUTORIALS = [*_DIGITS, "ipykernel", "nbclient", "tensorboard"]
_DOCS = ["myst-parser", "sphinx"]

setuptools.setup(
    name="keras-mp",
    version=_VERSION,
    description="Mixed precision training for tf.keras, on Keras 3 and on Keras 2",
    long_description=(_ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=setuptools.find_packages(include=["keras_mp", "keras_mp.*"]),
    package_data={"keras_mp": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=[f"tensorflow{_TENSORFLOW_VERSIONS}", "numpy", "absl-py"],
    # Where file names ignore case, a folder `build` could not stand beside Bazel's file `BUILD`.
    options={"build": {"build_base": ".build"}},
    extras_require={
        "legacy": _LEGACY,
        "gpu": [f"tensorflow[and-cuda]{_TENSORFLOW_VERSIONS}"],
        "tutorials": _TUTORIALS,
        "docs": _DOCS,
        "bench": [*_DIGITS, *_LEGACY, "torch"],
        "test": [*_TUTORIALS, *_DOCS, *_LEGACY, "hypothesis", "pytest>=8", "ruff"],
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
