"""Templates take data that cannot end the element that it stands in, and that is small."""

import base64
import json
import re
import zlib
from typing import Any

from zero_compiler.report.html_page import in_script


def unpacked(text: str) -> Any:
    """The data of an element, as `shared/words.js` reads it."""
    return json.loads(zlib.decompress(base64.b64decode(text)))


def data_of(page: str) -> Any:
    """The data of a page."""
    (packed,) = re.findall(r'<script type="text/plain" id="data">(.*?)</script>', page)
    return unpacked(packed)


def test_no_text_ends_the_script_that_it_stands_in():
    given = {"a": "</script><b>&", "b": ["\u2028", "é", 1.5, None]}
    text = in_script(given)
    assert not set("<>&\u2028") & set(text)
    assert unpacked(text) == given


def test_numbers_that_are_alike_take_little_room():
    assert len(in_script([5, 7, 9] * 10_000)) < 1000
