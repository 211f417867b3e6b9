"""Small `dataclass`, `field`, `replace` and `asdict`, with only the features that calculators use.

Python's own takes seconds to load in a browser: it imports `inspect`, and half of the library.
"""


class _Factory:
    """Factory of a field's default value, called for each object."""

    def __init__(self, make):
        self.make = make


def field(default_factory):
    """Return a default that is made for each object."""
    return _Factory(default_factory)


def dataclass(cls=None, frozen=False, eq=True):
    """Return a class with the annotated fields, with or without arguments; never frozen."""
    if cls is None:
        return lambda cls: dataclass(cls, frozen, eq)
    names = tuple(cls.__dict__.get("__annotations__", {}))
    defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}
    given = [f"{name}=defaults[{name!r}]" if name in defaults else name for name in names]
    lines = [f"def __init__(self, {', '.join(given)}):", "    held = self.__dict__"]
    for name in names:
        new = isinstance(defaults.get(name), _Factory)
        made = f"{name}.make() if {name} is defaults[{name!r}] else {name}" if new else name
        lines.append(f"    held[{name!r}] = {made}")
    lines += ["    self.__post_init__()"] * hasattr(cls, "__post_init__")
    space = {"defaults": defaults}
    exec("\n".join(lines), space)

    def values(self):
        return tuple([self.__dict__[name] for name in names])

    def __repr__(self):
        return f"{cls.__name__}({', '.join([f'{name}={getattr(self, name)!r}' for name in names])})"

    def __eq__(self, other):
        return values(self) == values(other) if type(self) is type(other) else NotImplemented

    def __hash__(self):
        return hash(values(self))

    cls.__dataclass_fields__ = names
    cls.__init__ = space["__init__"]
    if "__repr__" not in cls.__dict__:
        cls.__repr__ = __repr__
    if eq:
        cls.__eq__, cls.__hash__ = __eq__, __hash__ if frozen else None
    return cls


def replace(one, **changes):
    """Return a copy with some fields changed."""
    values = {name: getattr(one, name) for name in one.__dataclass_fields__}
    return type(one)(**{**values, **changes})


def asdict(one):
    """Return the fields by name, recursively for fields that are dataclass objects."""
    values = {name: getattr(one, name) for name in one.__dataclass_fields__}
    return {n: asdict(v) if hasattr(v, "__dataclass_fields__") else v for n, v in values.items()}
