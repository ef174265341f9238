"""How Sphinx builds the reference: python -m sphinx docs FOLDER."""

import pathlib
import re
import sys

_ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(_ROOT))

import keras_mp  # noqa: E402

# Keras 3 writes the name of the class into files, where it is that of Keras's own; a page about one
# of another name would say that it is an alias.
keras_mp.Policy.__name__ = "Policy"

project = "keras_mp"
copyright = "The keras_mp authors. Apache License 2.0"
version = release = keras_mp.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "description": "Mixed precision for tf.keras"}
html_show_sourcelink = False
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings tell types, with units and ranges
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False


def _read_as_markdown(app, what, name, obj, options, lines):
    """Turns `code` in a docstring, as Markdown writes it, into reStructuredText's ``code``."""
    # A letter that follows has to be set apart.
    text = re.sub(
        r"(?<!`)`([^`]+)`(?!`)(\w?)",
        lambda match: f"``{match[1]}``" + (f"\\ {match[2]}" if match[2] else ""),
        "\n".join(lines),
    )
    lines[:] = text.split("\n")


def _skip_what_tensorflow_documents(app, what, name, obj, skip, options):
    """Leaves out methods whose docstrings are TensorFlow's."""
    return True if str(getattr(obj, "__module__", "")).startswith("tensorflow") else None


def setup(app):
    """Called by Sphinx."""
    # Before napoleon, whose priority is 500.
    app.connect("autodoc-process-docstring", _read_as_markdown, priority=400)
    app.connect("autodoc-skip-member", _skip_what_tensorflow_documents)
