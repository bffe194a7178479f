# SPDX-License-Identifier: Apache-2.0
"""How arguments are said on a command line. Imports nothing of Megatron."""

from argparse import Action, ArgumentParser

# Arguments that no flag stores under their name: Megatron or this package fills them in.
_STORED_FROM = {"clean_seq_length": "seq_length", "padded_vocab_size": "vocab_size"}


class FlagNames:
    """Says an argument and its value as the user would type it.

    Without a parser, `--` and the name of the argument.
    """

    def __init__(self, parser: ArgumentParser | None = None) -> None:
        """Take the parser that read the command line."""
        self._actions: dict[str, list[Action]] = {}
        for action in parser._actions if parser is not None else ():
            self._actions.setdefault(action.dest, []).append(action)

    def flag(self, name: str) -> str:
        """Return the flag that stores an argument."""
        name = _STORED_FROM.get(name, name)
        options = [max(action.option_strings, key=len) for action in self._actions.get(name, ())]
        return options[0] if options else f"--{name.replace('_', '-')}"

    def typed(self, name: str, value: object) -> str | None:
        """Return what a user types for a value; None if nothing is typed for it."""
        name = _STORED_FROM.get(name, name)
        if value is None:
            return None
        for action in self._actions.get(name, ()):
            if action.nargs == 0 and action.const == value:
                return max(action.option_strings, key=len)
        switches = any(action.nargs == 0 for action in self._actions.get(name, ()))
        if isinstance(value, bool) and (switches or name not in self._actions):
            return self.flag(name) if value and not switches else None
        words = [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
        return " ".join([self.flag(name), *words])

    def difference(self, name: str, before: object, now: object) -> tuple[str, str]:
        """Say how an argument differs from an earlier run's, and what to use instead."""
        was, given = self.typed(name, before), self.typed(name, now)
        if was is not None and given is not None:
            flag = self.flag(name)
            shown = was.removeprefix(f"{flag} ") if given.startswith(f"{flag} ") else was
            return f"{given} differs from {shown}", f"Use {was}"
        if given is not None:
            return f"{given} is given and was not", f"Leave out {given.split(' ')[0]}"
        if was is not None:
            return f"{was.split(' ')[0]} is not given and was", f"Add {was}"
        return f"{name} {now} differs from {before}", f"Use {before}"
