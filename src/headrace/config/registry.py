"""Registries of alternatives: the sections of a run file that a `type` chooses between.

An alternative is one class in one file: it declares its keys and their checks, its description (the first sentence of
its docstring) and what it needs. A field whose type is the base class of a kind takes any registered alternative of
that kind. `headrace.runfile` imports the folders whose modules register them, so that a new one is only a new file.
"""

from __future__ import annotations

import builtins
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from headrace.config.base import IMPORTED, Config, as_table, type_values
from headrace.errors import InvalidValue, suggest_similar

T = TypeVar("T", bound="Alternative")


class Registry(Generic[T]):
    """The alternatives of one kind, by the `type` that chooses them."""

    def __init__(self, kind: str, *, default: str | None = None) -> None:
        self.kind = kind
        self.default = default
        """The type of a section that sets none; None: it must be set."""
        self._sections: dict[str, type[T]] = {}

    def register(self, section: type[T]) -> type[T]:
        """Add an alternative under each value of its `type`; one whose `type` is any text takes import paths."""
        for name in type_values(section) or (IMPORTED,):
            if name in self._sections:
                raise ValueError(f"{self.kind} {name!r} is registered by {self._sections[name]} and by {section}")
            self._sections[name] = section
        return section

    @property
    def names(self) -> list[str]:
        """The types that a run file may name, without import paths."""
        return [name for name in self.sections if name != IMPORTED]

    @property
    def sections(self) -> dict[str, type[T]]:
        """The registered classes in the order of their names, which does not depend on imports."""
        return dict(sorted(self._sections.items(), key=lambda item: (item[0] == IMPORTED, item[0])))

    def section(self, name: str) -> type[T]:
        """Return the class of a type or import path."""
        return self._sections[IMPORTED if ":" in name else name]

    def chosen_section(self, table: dict[str, Any]) -> type[T] | None:
        """Return the class that a table chooses; None if its type is not registered."""
        return self._sections.get(self.tag(table))

    def make_default(self) -> T:
        assert self.default is not None, f"a {self.kind} has no default"
        return self._sections[self.default].model_validate({})

    def tag(self, value: Any) -> str:
        """Return which alternative a table or a section is."""
        chosen = value.get("type", self.default) if isinstance(value, dict) else getattr(value, "type", self.default)
        return IMPORTED if ":" in str(chosen) else str(chosen or self.names[0])

    def table(self, value: Any, base: type[T]) -> Any:
        """Write a section in the one form that is validated; refuse a type that is not registered."""
        table = as_table(value, "type")
        if not isinstance(table, dict):
            return table
        table = base.expand_shorthands(dict(table))
        chosen = table.get("type", self.default)
        if chosen is None:
            raise InvalidValue("not set", key="type", fix=f"Set one of {', '.join(self.names)}.")
        if self.tag(table) not in self._sections:
            own = "; your own is named by import path, package.module:Class" if IMPORTED in self._sections else ""
            fix = suggest_similar(str(chosen), self.names, f"Known: {', '.join(self.names)}{own}.")
            raise InvalidValue(f"unknown {self.kind}", key="type", value=chosen, fix=fix)
        self._refuse_keys_of_others(table, str(chosen))
        return table

    def _refuse_keys_of_others(self, table: dict[str, Any], chosen: str) -> None:
        keys = self.section(chosen).model_fields
        for key in (key for key in table if key not in keys):
            owners = [name for name in self.names if key in self._sections[name].model_fields]
            fact = f"{chosen} has no such key" + (f"; it is one of {' and '.join(owners)}" if owners else "")
            if ":" in chosen:
                fix = suggest_similar(str(key), keys, f"Write what your own class takes as kwargs.{key}.")
                raise InvalidValue(fact, key=str(key), value=table[key], fix=fix)
            if owners:
                raise InvalidValue(fact, key=str(key), value=table[key], fix="Leave it out, or set another type.")


class Alternative(Config):
    """Base of the sections of a registry. The base class of a kind sets `REGISTRY`; its subclasses register there."""

    REGISTRY: ClassVar[Registry[Any]]

    type: str

    @classmethod
    def expand_shorthands(cls, table: dict[str, Any]) -> dict[str, Any]:
        """Rewrite the short forms and other names of keys that all alternatives of the kind accept."""
        return table

    @classmethod
    def alternatives(cls) -> list[builtins.type[BaseModel]]:
        is_base = "REGISTRY" in vars(cls)
        return list(dict.fromkeys(cls.REGISTRY.sections.values())) if is_base else [cls]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if "REGISTRY" not in vars(cls):
            return handler(source)
        registry = cls.REGISTRY
        if not registry.sections:
            raise RuntimeError(f"no {registry.kind} is registered: import headrace.runfile before this section is used")
        choices = {name: handler.generate_schema(section) for name, section in registry.sections.items()}
        union = core_schema.tagged_union_schema(choices, discriminator=registry.tag)
        return core_schema.no_info_before_validator_function(lambda value: registry.table(value, cls), union)
