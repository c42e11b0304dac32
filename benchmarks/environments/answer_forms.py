r"""Other ways to write a gold answer, and answers that are near it and wrong.

They are made from the LaTeX of the gold answer by rules of their own, which share nothing with the code that compares
answers. A rule that does not apply to an answer gives None.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

Rule = Callable[[str], str | None]

NUMBER = r"-?\d+(?:(?:,|\{,\}|,\s?\\!\s?)\d{3}(?!\d))*(?:\.\d+)?|-?\.\d+"
TEXT = r"\\(?:text(?:normal)?|mbox)\s?\{[^{}]*\}"
TOKEN = re.compile(rf"{TEXT}(?:\^\d)?|\\(?:begin|end)\{{\w+\}}|\\[a-zA-Z]+|\\.|{NUMBER}|\s+|.", re.DOTALL)
DIGITS = r"(?:\{(\d+)\}|\s?(\d))\s?(?:\{(\d+)\}|(\d))"
FRACTION = re.compile(rf"(-?)\\[dtc]?frac{DIGITS}")
MIXED = re.compile(rf"(\d+)\s?\\[dtc]?frac{DIGITS}")
MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", re.DOTALL)
BASE = re.compile(r"(-?[\dA-F.]+)_\{?(\d+)\}?")
UNIT = re.compile(rf"(.*?[^\s\\])(\s*(?:(?:\\[,;]\s?)?{TEXT}(?:\^\d)?|\^\\circ|\^\{{\\circ\}}|\\%))")
WORDS = re.compile(r"\\(?:text|mbox)\{([^{}]*)\}|\(\\text\{([A-Z])\}\)|([A-Z](?:, [A-Z])*)|(\d+)\\text\{ ([ap]\.m\.)\}")
NAMED = re.compile(r"([a-z])\s?(?:=|\\in)\s?")
AND = re.compile(r";|\\text\{[,\s]*(?:and|or)\s?\}")
RELATION = re.compile(r"<|>|\\leq?(?![a-z])|\\geq?(?![a-z])|\\approx")
ENDLESS = re.compile(r"-?\\infty")


def parts_of(text: str, separator: str = ",") -> list[str]:
    """Cut where no brackets and no number are around the separator."""
    parts, depth = [""], 0
    for token in TOKEN.findall(text):
        depth += (token in ("(", "[", "{", r"\{")) - (token in (")", "]", "}", r"\}"))
        if depth == 0 and (token == separator or (separator == "," and AND.fullmatch(token))):
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts if part.strip(" \\")]


def words_of(text: str) -> str | None:
    match = WORDS.fullmatch(text.strip())
    found = " ".join(group for group in match.groups() if group).strip() if match else ""
    return found if re.search(r"[A-Za-z]", found) else None


def bracketed(text: str) -> tuple[str, list[str], str] | None:
    """A tuple, an interval or a set: its brackets and what is in them."""
    plain = text.replace(r"\left", "").replace(r"\right", "").strip()
    for opening, closing in (("(", ")"), ("(", "]"), ("[", ")"), ("[", "]"), (r"\{", r"\}")):
        if plain.startswith(opening) and plain.endswith(closing) and len(parts_of(plain, r"\cup")) == 1:
            parts = parts_of(plain[len(opening) : -len(closing)].replace(",", ", "))
            return (opening, parts, closing) if len(parts) > 1 else None
    return None


def in_each_value(text: str, rule: Rule, only_first: bool = False) -> str | None:
    """Apply a rule to the single values of an answer, and put it together again."""
    done = []

    def apply(value: str) -> str:
        changed = None if (only_first and done) or ENDLESS.fullmatch(value) else rule(value)
        done.append(changed) if changed is not None else None
        return value if changed is None else changed

    result = _rebuilt(text.strip().rstrip("."), apply)
    return result if done else None


def _rebuilt(text: str, apply: Callable[[str], str]) -> str:
    if match := NAMED.match(text):
        return match[0] + _rebuilt(text[match.end() :], apply)
    if match := MATRIX.fullmatch(text):
        rows = [[_rebuilt(entry.strip(), apply) for entry in row.split("&")] for row in match[1].split(r"\\")]
        return r"\begin{pmatrix}" + r" \\ ".join(" & ".join(row) for row in rows) + r"\end{pmatrix}"
    for separator in (",", r"\cup", ":"):
        parts = parts_of(text, separator)
        if len(parts) > 1:
            return f"{separator} ".join(_rebuilt(part, apply) for part in parts)
    if enclosed := bracketed(text):
        opening, parts, closing = enclosed
        return opening + ", ".join(_rebuilt(part, apply) for part in parts) + closing
    if (match := UNIT.fullmatch(text)) and not re.search(r"\\(cos|sin|tan|text)", match[1]):
        return apply(match[1]) + match[2]
    if text.startswith((r"\$", r"-\$")):
        sign, _, amount = text.partition(r"\$")
        return rf"{sign}\${apply(amount.strip())}"
    return apply(text)


def number_of(text: str) -> Fraction | None:
    """A plain number, a fraction or a mixed number."""
    text = text.strip()
    if re.fullmatch(NUMBER, text):
        return Fraction(re.sub(r"[{},\s]|\\!", "", text))
    if match := MIXED.fullmatch(text):
        whole, top, bottom = (int(group) for group in match.groups() if group)
        return whole + Fraction(top, bottom)
    if match := FRACTION.fullmatch(text):
        top, bottom = (int(group) for group in match.groups()[1:] if group)
        return Fraction(-top if match[1] else top, bottom)
    if match := re.fullmatch(r"(-?\d+)/(\d+)", text):
        return Fraction(int(match[1]), int(match[2]))
    return None


def decimal(value: Fraction) -> str | None:
    """Exactly, or not at all."""
    places = next((n for n in range(12) if (value * 10**n).denominator == 1), None)
    if places is None:
        return None
    digits = f"{abs(value.numerator) * 10**places // value.denominator:0{places + 1}d}"
    return ("-" if value < 0 else "") + digits[: len(digits) - places] + "." + (digits[len(digits) - places :] or "0")


def equation_of(text: str) -> tuple[str, str] | None:
    """The sides of an equation that is more than a name and its value."""
    sides = text.split("=")
    return None if len(sides) != 2 or NAMED.match(text) else (sides[0].strip(), sides[1].strip())


def spaced(gold: str) -> str:
    return "  " + " ".join(token for token in TOKEN.findall(gold) if not token.isspace()) + " "


def other_commands(gold: str) -> str:
    text = re.sub(r"\\[dtc]?frac", r"\\dfrac", gold)
    text = re.sub(r"(?<!\\left)(?<!\\sqrt)([(\[])", r"\\left\1", text)
    text = re.sub(r"(?<!\\right)(?<!\\sqrt\[\d)([)\]])", r"\\right\1", text)
    text = text.replace("{pmatrix}", "{bmatrix}").replace(r"^\circ", r"^{\circ}")
    text = re.sub(r",\s?\\!\s?", "{,}", text)
    text = text.replace(r"\text{", r"\textbf{").replace(r"\mbox{", r"\text{")
    return rf"$\displaystyle {text}\,$."


def as_decimals(gold: str) -> str | None:
    def write(value: str) -> str | None:
        number = number_of(value)
        return None if number is None else decimal(number)

    return None if BASE.fullmatch(gold) or words_of(gold) or equation_of(gold) else in_each_value(gold, write)


def as_fractions(gold: str) -> str | None:
    def write(value: str) -> str | None:
        number = number_of(value)
        if number is None:
            return rf"\frac{{2({value})}}{{2}}" if r"\pm" not in value else None
        return rf"{'-' if number < 0 else ''}\frac{{{2 * abs(number.numerator)}}}{{{2 * number.denominator}}}"

    if sides := equation_of(gold):
        return f"2({sides[0]}) = 2({sides[1]})"
    return None if BASE.fullmatch(gold) or words_of(gold) or RELATION.search(gold) else in_each_value(gold, write)


def rearranged(gold: str) -> str | None:
    """Another order, other brackets, with a name or without, without units, plain words."""
    if word := words_of(gold):
        parts = [part.strip() for part in word.strip("()").split(",")]
        return ", ".join(reversed(parts)) if len(parts) > 1 else f"({word})" if len(word) == 1 else word.upper()
    if match := BASE.fullmatch(gold):
        return rf"{match[1]}_{{{match[2]}}}"
    if sides := equation_of(gold):
        return f"{sides[1]} = {sides[0]}"
    if RELATION.search(gold):
        return " > ".join(reversed(gold.split("<"))) if "<" in gold else None
    if match := NAMED.match(gold):
        return gold[match.end() :]
    for separator in (",", r"\cup"):
        parts = parts_of(gold, separator)
        if len(parts) > 1:
            return f"{separator} ".join(reversed(parts))
    if (enclosed := bracketed(gold)) and enclosed[0] == r"\{":
        return ", ".join(reversed(enclosed[1]))
    if r"\pm" in gold:
        return gold.replace(r"\pm", "+") + r" \text{ or } " + gold.replace(r"\pm", "-")
    if match := MATRIX.fullmatch(gold):
        columns = "c" * (match[1].split(r"\\")[0].count("&") + 1)
        return rf"\left[\begin{{array}}{{{columns}}}{match[1]}\end{{array}}\right]"
    if ":" in gold:
        return gold.replace(":", r" \text{ to } ")
    if (match := UNIT.fullmatch(gold)) and not re.search(r"\\(cos|sin|tan)", gold):
        return match[1]
    if r"\$" in gold:
        return gold.replace(r"\$", "") + " dollars"
    return gold.replace("-", "\u2212") if bracketed(gold) else f"k = {gold}"


def counted(gold: str) -> str | None:
    """A bare number with a unit of several words."""
    return None if number_of(gold) is None else f"{gold} eggs per day"


RIGHT: dict[str, Rule] = {
    "spaced": spaced,
    "other commands": other_commands,
    "as decimals": as_decimals,
    "as fractions": as_fractions,
    "rearranged": rearranged,
    "counted": counted,
}


def changed(gold: str) -> str | None:
    """One more than the gold answer, in its first value."""

    def add_one(value: str) -> str:
        number = number_of(value)
        if number is None:
            return value.replace(r"\pm", "+", 1) if r"\pm" in value else f"{value}+1"
        number += 1
        return str(number) if number.denominator == 1 else rf"\frac{{{number.numerator}}}{{{number.denominator}}}"

    if words_of(gold):
        return _other_words(gold)
    if match := BASE.fullmatch(gold):
        return rf"{match[1]}_{{{int(match[2]) + 1}}}"
    if sides := equation_of(gold):
        return f"{sides[0]} = {sides[1]} + 1"
    if RELATION.search(gold):
        if "<" not in gold:
            return None
        first, second, *rest = gold.split("<")
        return "<".join([second, first, *rest])
    return in_each_value(gold, add_one, only_first=True)


def turned(gold: str) -> str | None:
    """Another sign, order or bracket, or a part of it alone."""

    def negate(value: str) -> str | None:
        return None if number_of(value) == 0 else f"-({value})"

    if words_of(gold):
        return rf"\text{{not }} {gold}"
    if sides := equation_of(gold):
        return None if sides[1] == "0" else f"{sides[0]} = -({sides[1]})"
    if r"\pm" in gold:
        return gold.replace(r"\pm", "-")
    for separator in (",", r"\cup"):
        parts = parts_of(gold, separator)
        if len(parts) > 1:
            return f"{separator} ".join(parts[:-1])
    if enclosed := bracketed(gold):
        opening, parts, closing = enclosed
        if opening == r"\{":
            return ", ".join(parts[:-1])
        if len(parts) == 2:
            return ("[" if opening == "(" else "(") + ", ".join(parts) + closing
        return None if parts == parts[::-1] else opening + ", ".join(reversed(parts)) + closing
    if match := BASE.fullmatch(gold):
        return f"{match[1]}1_{{{match[2]}}}"
    if "<" in gold:
        return gold.replace("<", ">", 1)
    if ":" in gold:
        parts = gold.split(":")
        return ":".join(reversed(parts)) if parts != parts[::-1] else ":".join([*parts, "2"])
    return in_each_value(gold, negate, only_first=True)


def hedged(gold: str) -> str | None:
    """The gold answer and another one: who says both has not answered."""
    other = changed(gold)
    return None if other is None else rf"{gold} \text{{ or }} {other}"


def reckoned(gold: str) -> str | None:
    """A bare number with a word that makes another one of it."""
    number = number_of(gold)
    return None if not number else f"{gold} {('dozen', 'squared', 'tenths')[number.numerator % 3]}"


def _other_words(gold: str) -> str:
    if re.search(r"\d", gold):
        return re.sub(r"\d+", lambda match: str(int(match[0]) + 1), gold, count=1)
    found = words_of(gold) or ""
    letters = re.findall(r"(?<![A-Za-z])[A-Z](?![A-Za-z])", found)
    if letters:
        other = next(letter for letter in "ABCDEFGHZ" if letter not in letters)
        return gold.replace(letters[-1], other)
    return gold.replace(found, found[::-1] + "x")


WRONG: dict[str, Rule] = {"changed": changed, "turned": turned, "hedged": hedged, "reckoned": reckoned}
