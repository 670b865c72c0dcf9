"""Templates take data that cannot end the element that it stands in."""

import json

from zero_compiler.report.html_page import in_script


def test_no_text_ends_the_script_that_it_stands_in():
    given = {"a": "</script><b>&", "b": ["\u2028", "é", 1.5, None]}
    text = str(in_script(given))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == given
