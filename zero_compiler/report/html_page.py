"""Pages of HTML that need nothing from elsewhere: templates with their styles, scripts and data in them."""

from __future__ import annotations

import json

import jinja2
from markupsafe import Markup


def rendered(template: str, data: object, **values: object) -> str:
    """A page from ``template``, a path in the folder of templates.

    In it ``source(path)`` is another file of that folder as it is, and ``data`` is JSON to stand in a script element.
    """
    loader = jinja2.PackageLoader("zero_compiler")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["source"] = lambda path: Markup(loader.get_source(environment, path)[0])
    return environment.get_template(template).render(data=in_script(data), **values)


def in_script(data: object) -> Markup:
    """JSON that no text in it can end the script element of."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)
