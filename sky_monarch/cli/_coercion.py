"""Plain parameters without pydantic, by which Typer checks every value: to load it is a third of what a `status` costs.

A text is taken as it is, and so is a decimal number within its bounds. Whatever else there is Typer decides, in its own
words. Its hook for that is private: where it is not there, Typer decides everything.
"""

from __future__ import annotations

from typing import Any

__all__ = ["check_plainly"]

_LONGEST = 18  # digits of a number that needs no second look


class _Plain:
    """How one parameter is checked, in place of Typer's ``RuntimeParam``.

    Args:
        annotation: ``str``, ``int`` or ``bool``.
        info: Typer's description of the parameter, with its bounds.
    """

    def __init__(self, annotation: type, info: Any) -> None:
        self._annotation = annotation
        self._low, self._high = getattr(info, "min", None), getattr(info, "max", None)

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value that the command gets.

        Raises:
            typer.BadParameter: It is none.
        """
        if type(value) is self._annotation and self._annotation is not int:
            return value
        if self._annotation is int and (number := self._number(value)) is not None:
            return number
        if value is None and not (param.multiple or param.nargs == -1):
            return None
        from typer import _coercion

        own = _coercion.build_runtime_param(param.type_descriptor)
        return own.coerce(value, param=param, ctx=ctx)

    def _number(self, value: Any) -> int | None:
        if type(value) is str and value.isascii() and value.isdecimal() and len(value) <= _LONGEST:
            value = int(value)
        if type(value) is not int:
            return None
        within = (self._low is None or value >= self._low) and (self._high is None or value <= self._high)
        return value if within else None


def check_plainly(parameters: list[Any]) -> None:
    """Have parameters of a command that are plain texts and numbers checked without pydantic."""
    for parameter in parameters:
        descriptor = getattr(parameter, "type_descriptor", None)
        if descriptor is None or getattr(parameter, "_runtime_param", descriptor) is not None:
            continue  # of another Typer, or prepared before
        info = descriptor.parameter_info
        special = any(getattr(info, name, None) is not None for name in ("parser", "click_type"))
        if descriptor.annotation in (str, int, bool) and not (
            special or descriptor.is_path or descriptor.is_choice
        ):
            parameter._runtime_param = _Plain(descriptor.annotation, info)
