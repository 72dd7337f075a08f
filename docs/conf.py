"""Sphinx's settings: `make docs` builds the site that this folder is the source of.

Nothing on a page comes from the network: system fonts, no MathJax (formulas are text), and Sphinx's
own search, which works from a file as well as from a server.
"""

from __future__ import annotations

import logging

logging.getLogger("traitlets").setLevel(logging.ERROR)  # one line for each kernel otherwise

project = "SnapMLA"
author = "The SnapMLA authors"
copyright = "the SnapMLA authors, MIT licence"  # noqa: A001 (Sphinx's name)

extensions = ["myst_nb"]
exclude_patterns = ["exercises/**", "[0-9][0-9]_*.py", "_static/**"]  # scripts have notebooks
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]

# Every notebook runs at every build, since stages may have changed; a cell that fails stops it.
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # they would come from the network

html_theme = "furo"
html_title = "SnapMLA"
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
