"""How Sphinx builds this folder: ``scripts/docs`` runs it, with warnings as errors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package, and what generates the reference

from piper_ray.version import __version__

project = "piper_ray"
author = "piper_ray contributors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "scripts.documentation.site"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns: list[str] = []

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # logs and TOML fragments are shown as they are

autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # what stands in the source can be read, so that long signatures are broken into lines
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": False}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries = False

html_theme = "furo"
html_title = f"piper_ray {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("tables.js", {"defer": "defer"})]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
