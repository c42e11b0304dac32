"""Assert that wrong input is refused, on the fields of the error: its wording stays free to improve."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.errors import BadInput


@contextmanager
def refused(kind: type[BadInput] = BadInput, **fields: Any) -> Iterator[pytest.ExceptionInfo[BadInput]]:
    """Expect an error of this kind with these fields: `key`, `value`, `file`, `line`, ..."""
    with pytest.raises(kind) as error:
        yield error
    assert {name: getattr(error.value, name) for name in fields} == fields
