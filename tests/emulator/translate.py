"""Kernel source -> C++ for the host: each asm statement becomes calls of the functions in ptx.hpp, the rest stays as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator

_ASM = re.compile(r"\basm\b(?:\s+volatile\b)?\s*\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_SYSTEM_INCLUDE_OR_UNROLL = re.compile(r"^[ \t]*#[ \t]*(?:include[ \t]*<.*|pragma[ \t]+unroll.*)$", re.MULTILINE)
_SHARED = re.compile(r"\b(extern\s+)?__shared__\b")
_LABEL = re.compile(r"([A-Za-z_]\w*):(?!:)\s*")
_GUARD = re.compile(r"@(!?\w+)\s+")
_TOKEN = re.compile(r"%(\d+)|%%([\w.]+)|([A-Za-z_]\w*|\d+)")

_REGISTERS = {".b16": "unsigned short", ".pred": "bool"}


def translate(source: str) -> str:
    """The text of a translation unit, line for line; loops are not unrolled and the toolkit's headers left out."""
    source = _SYSTEM_INCLUDE_OR_UNROLL.sub("", source)
    source = _SHARED.sub(lambda match: match[1] or "static", source)  # one for all threads: blocks run one after the other
    parts, done = [], 0
    for match in _ASM.finditer(source):
        end = _closing(source, match.end())
        stop = source.index(";", end) + 1
        statement = source[match.start():stop]
        parts += [source[done:match.start()], calls(source[match.end():end]), "\n" * statement.count("\n")]
        done = stop
    return "".join((*parts, source[done:]))


def calls(asm: str) -> str:
    """The C++ block for what stands in the parentheses of an asm statement."""
    template, *operand_lists = _split(asm, ":")
    text = "".join(_STRING.findall(template))
    operands = [operand for part in operand_lists[:2] for operand in _operands(part)]
    body = text.strip().removeprefix("{").removesuffix("}") if text.strip().startswith("{") else text
    lines = [line.strip() for line in body.split(";") if line.strip()]
    labels = [label[1] for line in lines if (label := _LABEL.match(line))]  # of this statement alone, as in braces of PTX
    local = f"__label__ {', '.join(labels)}; " if labels else ""
    return f"{{ {local}{' '.join(_instruction(line, operands) for line in lines)} }}"


def _instruction(text: str, operands: list[str]) -> str:
    """One PTX instruction, maybe with a label before it or a predicate; or declaration of registers for 16 bits or predicates."""
    if label := _LABEL.match(text):
        return f"{label[1]}: {_instruction(text[label.end():], operands)}"
    if guard := _GUARD.match(text):
        return f"if ({guard[1]}) {_instruction(text[guard.end():], operands)}"
    if not text:  # behind a label at the end
        return ";"
    mnemonic, _, rest = text.partition(" ")
    if mnemonic == "bra":
        return f"goto {rest.strip()};"
    if mnemonic == ".reg":
        kind, _, names = rest.partition(" ")
        if kind not in _REGISTERS:
            raise ValueError(f"the emulator knows registers of {' and '.join(_REGISTERS)} only: {text}")
        return f"{_REGISTERS[kind]} {names};"
    arguments = []
    for number, special, literal in _TOKEN.findall(rest):
        if number:
            arguments.append(operands[int(number)])
        elif literal != "_":  # a result that nobody wants
            arguments.append(f"ptx::{special.replace('.', '_')}()" if special else literal)
    return f"ptx::{re.sub('[.:]+', '_', mnemonic)}({', '.join(arguments)});"


def _operands(part: str) -> Iterator[str]:
    """Expressions of a list like ``"=r"(x), "l"(p)``."""
    for operand in _split(part, ","):
        constraint = _STRING.match(operand.strip())
        if constraint:
            yield operand.strip()[constraint.end():].strip()[1:-1]


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators that stand outside strings and parentheses; C++'s :: does not occur there."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        string = _STRING.match(text, i)
        if string:
            i = string.end()
            continue
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if text[i] == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
        i += 1
    return [*parts, text[start:]]


def _closing(text: str, i: int) -> int:
    """Where the parenthesis that was opened before i is closed."""
    depth = 1
    while True:
        string = _STRING.match(text, i)
        if string:
            i = string.end()
            continue
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
        i += 1
