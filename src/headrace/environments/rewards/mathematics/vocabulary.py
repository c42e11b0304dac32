r"""The signs, commands and words of mathematical answers, and which of them mean the same."""

from __future__ import annotations

SIGNS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"),
    **dict.fromkeys("\u2044\u2215\u00f7", "/"), **dict.fromkeys("\u00a0\u2009\u200a\u202f", r"\,"),
    **dict.fromkeys("\u2018\u2019\u2032", "'"), **dict.fromkeys('\u200b\ufeff"\u201c\u201d', ""),
    **dict.fromkeys("\u00d7\u00b7\u22c5", r"\cdot "), **dict.fromkeys("\u00b0\u00ba", r"^\circ "),
    "\u03c0": r"\pi ", "\u03b8": r"\theta ", "\u221a": r"\sqrt ", "\u221e": r"\infty ", "\u00b1": r"\pm ",
    "\u2213": r"\mp ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u2248": r"\approx ",
    "\u222a": r"\cup ", "\u2208": r"\in ", "\u2205": r"\emptyset ", "\u2026": r"\ldots ", "\u211d": r"\mathbb{R}",
    "\u00b2": "^2", "\u00b3": "^3", "\u00bd": r"\frac12", "\u00bc": r"\frac14", "\u00be": r"\frac34",
    "\u20ac": r"\text{euro}", "\u00a3": r"\text{pound}", "\u00a2": r"\text{cent}",
}  # fmt: skip
"""Single characters as LaTeX."""

SIZES = tuple(rf"\{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "m", "r"))
STYLES = (r"\displaystyle", r"\textstyle", r"\scriptstyle", r"\limits", r"\nolimits", r"\rm", r"\bf", r"\it")
SIZES_OF_TEXT = (r"\large", r"\Large", r"\LARGE", r"\huge", r"\Huge", r"\normalsize", r"\small")
EMPHASIS = (r"\boldsymbol", r"\bm", r"\underline", r"\blacksquare")
SPACES = (r"\!", r"\,", r"\;", r"\:", r"\>", "\\ ", "\\\n", "~", r"\quad", r"\qquad")
DELIMITERS = (r"\left", r"\right", r"\middle", r"\boxed", r"\fbox", r"\(", r"\)", r"\[", r"\]")
LAYOUT_COMMANDS = {*SIZES, *STYLES, *SIZES_OF_TEXT, *EMPHASIS, *SPACES, *DELIMITERS}
"""Commands without meaning; they are dropped."""
LAYOUT_COMMANDS_WITH_ARGUMENT = {r"\phantom", r"\hphantom", r"\hspace", r"\vspace", r"\color", r"\textcolor"}
"""Commands that are dropped with their argument."""
TEXT_COMMANDS = {rf"\text{face}" for face in ("", "bf", "it", "rm", "sf", "normal")} | {
    *(r"\mbox", r"\hbox", r"\mathrm", r"\mathbf", r"\mathit", r"\mathsf")
}
"""Commands with words as argument."""

_SPELLINGS = r"""\frac \dfrac \tfrac \cfrac, \binom \dbinom \tbinom, \le \leq \leqslant, \ge \geq \geqslant, \ne \neq,
    \cdot \times \ast *, | \lvert \rvert \vert \mid, \ldots \dots \cdots, \sqrt sqrt, \overline \bar, < \lt, > \gt,
    / \div, : \colon, \{ \lbrace, \} \rbrace, [ \lbrack, ] \rbrack, \emptyset \varnothing, \text{or} \lor,
    \text{and} \land, \% %"""
SPELLING = {other: token for token, *others in map(str.split, _SPELLINGS.split(",")) for other in others}
"""The token that replaces each token of the same meaning."""
ARGUMENT_COUNTS = {
    **dict.fromkeys((r"\frac", r"\binom"), 2),
    **dict.fromkeys((r"\sqrt", r"\overline", r"\vec", r"\hat", r"\overrightarrow", r"\pmod"), 1),
}
"""Number of arguments of a command."""
NAME_COMMANDS = {r"\begin", r"\end", r"\mathbb", r"\mathcal", r"\operatorname"}
"""Commands with a name as argument: both are one token."""
OPENING = {"(", "[", "{", r"\{", r"\langle"}
CLOSING = {")", "]", "}", r"\}", r"\rangle"}
RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\approx")
REVERSED = {">": "<", r"\ge": r"\le"}
MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array")

TRIGONOMETRY = ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh")
FUNCTIONS = frozenset(rf"\{name}" for name in (*TRIGONOMETRY, "log", "ln", "exp"))
OPERATORS = {*FUNCTIONS, "+", "-", "/", "^", "!", "|", r"\cdot", r"\pi", r"\infty", r"\frac", r"\sqrt"}
"""Tokens that make a side of an equation more than a name."""

SPELLED_SIGNS = {
    **{command[1:]: command for command in (*FUNCTIONS - {r"\sec"}, r"\pi", r"\theta", r"\infty")},
    **dict.fromkeys(("infinity", "oo"), r"\infty"),
    **dict.fromkeys(("percent", "percentage", "pct"), r"\%"),
    **dict.fromkeys(("degree", "degrees", "deg"), r"\degree"),
}
"""Words for signs; "sec" is a second."""
CONNECTIVES = ("and", "or", "to")
_UNITS = """inch inches in, foot feet ft, yard yards yd, mile miles mi, millimeter millimeters millimetres mm,
    centimeter centimeters centimetres cm, meter meters metre metres m, kilometer kilometers kilometres km,
    gram grams gm g, kilogram kilograms kg, milliliter milliliters millilitres ml, liter liters litre litres l,
    ounce ounces oz, pound pounds lb lbs gbp, second seconds sec secs s, minute minutes min mins, hour hours hr hrs h,
    day days, week weeks, month months, year years, cent cents, dollar dollars usd, euro euros eur, radian radians,
    celsius, fahrenheit"""
CANONICAL_UNITS = {name: names[0] for names in map(str.split, _UNITS.split(",")) for name in names}
"""One name per unit, by each of its spellings. Units that are not listed are ignored."""
CURRENCIES = {"us", "usd", "euro", "eur", "pound", "gbp"}
"""Units that may stand in front."""
TEMPERATURES = {"C": "celsius", "F": "fahrenheit"}
DIMENSIONS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
"""Words for the exponent of a unit."""
_SCALES = {
    "pair": 2, "dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
SCALES = {"gross": 144, **_SCALES, **{f"{name}s": scale for name, scale in _SCALES.items()}}
ODD_PLURALS = ("people", "ppl", "men", "women", "children", "fish", "sheep", "deer", "mice", "geese", "teeth", "dice")
UNITS_WITHOUT_PLURAL = ("mph", "mpg", "kph", "kb", "mb", "gb", "tb", "sq", "square", "cubic")
IGNORED_WORDS = ("total", "altogether", "left", "each")
KNOWN_UNITS = {*CANONICAL_UNITS, *SCALES, *ODD_PLURALS, *UNITS_WITHOUT_PLURAL, *IGNORED_WORDS}
"""Words that are units after every number. Others are units if plural, or after a number up to one: `1 egg`."""
ORDINALS = ("third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "hundredth", "thousandth")
NOT_UNITS = {
    *("am", "pm", "not", "no", "times", "more", "less", "than", "if", "for", "when", "is", "was", "this", "but"),
    *("minus", "plus", "divided", "multiplied", "equals", "versus", "vs", "mod", "choose", "power", "factorial"),
    *("half", "halves", *ORDINALS, *(f"{ordinal}s" for ordinal in ORDINALS)),
    *("squared", "cubed", "doubled", "tripled", "halved", "twice", "thrice"),
    *("wrong", "false", "incorrect", "maybe", "perhaps"),
}
"""Words that are not units of the preceding number."""
MAX_UNIT_WORDS = 6
_SHORT_UNITS = {name for name in CANONICAL_UNITS if 1 < len(name) < 4} - {"ml"}
SHORT_WORDS = {"am", "pm", "mph", "men", *CONNECTIVES, *_SHORT_UNITS}
"""Short words; others as short, and ml, are products of letters where there are variables."""
UNIT_LETTERS = {*(name for name in CANONICAL_UNITS if len(name) == 1), "L"}
"""Letters that are units among words, and after a number where there are no variables."""
