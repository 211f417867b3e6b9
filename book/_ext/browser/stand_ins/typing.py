"""Names for annotations, which nothing reads here, and `NamedTuple` as a base class.

Python's own module imports half of the library.
"""

TYPE_CHECKING = False
Any = object


class _Fields(type):
    """Metaclass that turns a class with annotated fields into a tuple subclass."""

    def __new__(meta, name, bases, space):
        """Return the class; each field becomes a property that looks up its index."""
        names = tuple(space.get("__annotations__", ()))
        if bases != (tuple,):
            defaults = {field: space.pop(field) for field in names if field in space}
            given = [f"{name}=defaults[{name!r}]" if name in defaults else name for name in names]
            made = {"defaults": defaults}
            exec(
                f"def __new__(cls, {', '.join(given)}):\n"
                f"    return tuple.__new__(cls, ({', '.join(names)},))",
                made,
            )
            space["_fields"], space["__new__"] = names, made["__new__"]
            for place, field in enumerate(names):
                space[field] = property(lambda self, place=place: self[place])
        return type.__new__(meta, name, bases, space)


class NamedTuple(tuple, metaclass=_Fields):
    """Tuple with named fields."""

    def _asdict(self):
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **changes):
        return type(self)(**{**self._asdict(), **changes})

    def __repr__(self):
        named = [f"{name}={value!r}" for name, value in self._asdict().items()]
        return f"{type(self).__name__}({', '.join(named)})"
