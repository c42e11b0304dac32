"""What computed the steps of a run, `platform.json`: numbers can differ between two of them by rounding."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.rollout.schema import SCHEMA, decode_versioned


class Platform(msgspec.Struct, frozen=True):
    """Software and hardware of a trainer."""

    versions: dict[str, str]
    machine: str
    """The architecture, such as `x86_64`."""
    device: str
    """`cpu`, or the name of the GPU."""
    dtype: str
    """Of the computation, such as `float32`."""
    threads: int
    """CPU threads of each rank."""
    ranks: int
    schema: int = SCHEMA

    def differences(self, other: Platform) -> list[str]:
        """Return a text `NAME: OWN, here OTHER` for each field that differs."""
        own, others = self._facts(), other._facts()
        return [f"{name}: {own[name]}, here {others.get(name)}" for name in own if own[name] != others.get(name)]

    def _facts(self) -> dict[str, object]:
        facts = msgspec.structs.asdict(self)
        return {**facts.pop("versions"), **facts}


def read_platform(path: Path) -> Platform | None:
    """Return the platform of the last start of a run's trainer; None: an older version wrote the run."""
    return decode_versioned(path.read_bytes(), Platform, str(path)) if path.is_file() else None
