"""How a rank's command is executed: directly, or by a shell.

A command that needs no shell gets none: one process less between the agent and the rank, signals and exit
codes that are the program's own, and a Python command that a warm standby can take over. The test for it is
strict: where bash would do anything but split words and remove quotes, bash does it.
"""

from __future__ import annotations

from typing import Literal, TypedDict

__all__ = ["ExecCommand", "ShellCommand", "rank_command"]


class ExecCommand(TypedDict):
    """A program and its arguments (protocol.rs, ``RankCommand::Exec``)."""

    kind: Literal["exec"]
    argv: list[str]


class ShellCommand(TypedDict):
    """Shell text (protocol.rs, ``RankCommand::Shell``)."""

    kind: Literal["shell"]
    script: str


# Unquoted, each of these can make bash do more than split words: operators, expansions, globs, braces,
# tildes.
_ACTIVE = frozenset("|&;<>()$`*?[]{}~")

# What `compgen -b` and `compgen -k` of bash 5.2 list, less the words that hold an active character. A program
# of the same name may exist (`echo`, `true`, `test`), but bash would not run it.
_BASH_WORDS = frozenset(
    [
        ".",
        ":",
        "alias",
        "bg",
        "bind",
        "break",
        "builtin",
        "caller",
        "cd",
        "command",
        "compgen",
        "complete",
        "compopt",
        "continue",
        "declare",
        "dirs",
        "disown",
        "echo",
        "enable",
        "eval",
        "exec",
        "exit",
        "export",
        "false",
        "fc",
        "fg",
        "getopts",
        "hash",
        "help",
        "history",
        "jobs",
        "kill",
        "let",
        "local",
        "logout",
        "mapfile",
        "popd",
        "printf",
        "pushd",
        "pwd",
        "read",
        "readarray",
        "readonly",
        "return",
        "set",
        "shift",
        "shopt",
        "source",
        "suspend",
        "test",
        "times",
        "trap",
        "true",
        "type",
        "typeset",
        "ulimit",
        "umask",
        "unalias",
        "unset",
        "wait",
        "if",
        "then",
        "else",
        "elif",
        "fi",
        "case",
        "esac",
        "for",
        "select",
        "while",
        "until",
        "do",
        "done",
        "in",
        "function",
        "time",
        "coproc",
        "!",
    ]
)


def rank_command(run: str) -> ExecCommand | ShellCommand:
    """Decide how ``run`` is executed.

    Comment lines, blank lines and lines continued with a backslash do not make a shell necessary.

    Args:
        run: Text of the job file's ``run``.

    Returns:
        ``{"kind": "exec", "argv": [...]}`` where ``run`` is one simple command whose words mean
        themselves, else ``{"kind": "shell", "script": run}``.
    """
    argv = _simple_words(run)
    if argv is None or not argv[0] or argv[0] in _BASH_WORDS:
        return ShellCommand(kind="shell", script=run)
    return ExecCommand(kind="exec", argv=argv)


def _simple_words(text: str) -> list[str] | None:
    """Words of the one simple command in ``text`` after quote removal; None where bash is needed."""
    words: list[str] = []
    word: str | None = None  # None between words; "" inside one that is empty so far
    ended = False  # a newline closed the command
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char in " \t\n":
            if word is not None:
                words.append(word)
                word = None
            ended = ended or (char == "\n" and bool(words))
            continue
        if char == "#" and word is None:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        if char == "\\" and text[at : at + 1] == "\n":
            at += 1
            continue
        if ended or char in _ACTIVE or char in "\0\r":
            return None
        if char == "=" and not words:
            return None  # an assignment in front of the command
        word = word or ""
        if char == "\\":
            if at == len(text):
                return None
            word += text[at]
            at += 1
        elif char == "'":
            end = text.find("'", at)
            if end < 0:
                return None
            word += text[at:end]
            at = end + 1
        elif char == '"':
            quoted = _double_quoted(text, at)
            if quoted is None:
                return None
            word, at = word + quoted[0], quoted[1]
        else:
            word += char
    if word is not None:
        words.append(word)
    return words or None


def _double_quoted(text: str, at: int) -> tuple[str, int] | None:
    """Content of the double quotes that opened before ``at``, and the index behind them."""
    content = ""
    while at < len(text):
        char = text[at]
        at += 1
        if char == '"':
            return content, at
        if char in "$`\0\r":
            return None
        if char == "\\" and at < len(text) and text[at] in '$`"\\\n':
            content += "" if text[at] == "\n" else text[at]
            at += 1
        else:
            content += char
    return None
