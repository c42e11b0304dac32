"""Short names for long paths."""

from headrace.tools.common import short_names


def test_names_are_as_short_as_can_be():
    assert short_names(["/x/a/m", "/x/b/m"]) == ["a/m", "b/m"]
    assert short_names(["/x/a/m", "/y/a/n"]) == ["m", "n"]
    assert short_names(["/x/a", "/x/a"]) == ["/x/a", "/x/a"]
