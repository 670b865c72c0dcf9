"""Pages of HTML that need nothing from elsewhere: templates with their styles, scripts and data in them."""

from __future__ import annotations

import base64
import json
import zlib

import jinja2
from markupsafe import Markup


def rendered(template: str, data: object, **values: object) -> str:
    """A page from ``template``, a path in the folder of templates.

    In it ``source(path)`` is another file of that folder as it is, and ``data`` is what :func:`in_script` makes of it.
    """
    loader = jinja2.PackageLoader("zero_compiler")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["source"] = lambda path: Markup(loader.get_source(environment, path)[0])
    return environment.get_template(template).render(data=in_script(data), **values)


def in_script(data: object) -> str:
    """JSON to stand in a script element, where ``data()`` of `shared/words.js` reads it. It is packed, since a plan has
    long lists of numbers that are alike: a page of a deep model becomes a sixth of its size."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
