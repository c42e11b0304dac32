"""Assert on the fields of an error of the user's input, so that its wording stays free."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.errors import BadInput


@contextmanager
def refused(kind: type[BadInput] = BadInput, **fields: Any) -> Iterator[pytest.ExceptionInfo[BadInput]]:
    """Expect an error of this type with these fields."""
    with pytest.raises(kind) as error:
        yield error
    assert {name: getattr(error.value, name) for name in fields} == fields
