"""What an endpoint may be called with, checked where it is called: the error is raised there, and not elsewhere."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Signature"]


class Signature:
    """Of a method, without the actor itself.

    Args:
        method: As the class has it. Where Python knows no signature of it, everything passes.
    """

    __slots__ = ("_least", "_most", "_signature")

    def __init__(self, method: Callable[..., Any]) -> None:
        self._least, self._most = 0, -1
        self._signature: inspect.Signature | None = None
        try:
            # Not that of what a decorator wraps: the decorator may take other arguments.
            whole = inspect.signature(method, follow_wrapped=False)
        except (TypeError, ValueError):
            return
        parameters = list(whole.parameters.values())
        if parameters and parameters[0].kind not in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        ):
            parameters = parameters[1:]
        self._signature = whole.replace(parameters=parameters)
        self._most = self._count(parameters)
        self._least = sum(
            one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
            for one in parameters
        )

    @staticmethod
    def _count(parameters: list[inspect.Parameter]) -> int:
        """How many positional arguments it takes at the most; none where positional ones are never enough."""
        if any(one.kind is one.KEYWORD_ONLY and one.default is one.empty for one in parameters):
            return -1
        if any(one.kind is one.VAR_POSITIONAL for one in parameters):
            return 1 << 30
        return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)

    def check(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a call that cannot succeed.

        Args:
            name: Of the endpoint, for the error: ``trainer.step``.
            args: Of the call.
            kwargs: Of the call.

        Raises:
            TypeError: An argument is missing, or one too many; the words show the signature.
        """
        # Binding costs several microseconds, this does not.
        if (not kwargs and self._least <= len(args) <= self._most) or self._signature is None:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}{self._signature}: {error}") from None
