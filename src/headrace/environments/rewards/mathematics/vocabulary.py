r"""The signs, commands and words of mathematical answers, and which of them mean the same."""

from __future__ import annotations

SIGNS = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d", "-"),
    **dict.fromkeys("\u2044\u2215\u00f7", "/"),
    **dict.fromkeys("\u00a0\u2009\u200a\u202f", r"\,"),
    **dict.fromkeys("\u2018\u2019\u2032", "'"),
    **dict.fromkeys('\u200b\ufeff"\u201c\u201d', ""),
    **dict.fromkeys("\u00d7\u00b7\u22c5", r"\cdot "),
    "\u03c0": r"\pi ",
    "\u03b8": r"\theta ",
    "\u221a": r"\sqrt ",
    "\u221e": r"\infty ",
    "\u00b0": r"^\circ ",
    "\u00b1": r"\pm ",
    "\u2213": r"\mp ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u2248": r"\approx ",
    "\u222a": r"\cup ",
    "\u2208": r"\in ",
    "\u2205": r"\emptyset ",
    "\u211d": r"\mathbb{R}",
    "\u00b2": "^2",
    "\u00b3": "^3",
    "\u00bd": r"\frac12",
    "\u00bc": r"\frac14",
    "\u00be": r"\frac34",
    "\u20ac": r"\text{euro}",
    "\u00a3": r"\text{pound}",
    "\u00a2": r"\text{cent}",
}
"""Single characters as LaTeX."""

SIZES = tuple(rf"\{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "m", "r"))
STYLES = (r"\displaystyle", r"\textstyle", r"\scriptstyle", r"\limits", r"\nolimits", r"\rm", r"\bf", r"\it")
SPACES = (r"\!", r"\,", r"\;", r"\:", r"\>", "\\ ", "\\\n", "~", r"\quad", r"\qquad")
DROPPED = {*SIZES, *STYLES, *SPACES, r"\left", r"\right", r"\middle", r"\boxed", r"\fbox", r"\(", r"\)", r"\[", r"\]"}
"""Commands that say how it looks, not what it is."""
INVISIBLE = {r"\phantom", r"\hphantom", r"\hspace", r"\vspace"}
"""The same, with an argument."""
IN_WORDS = {rf"\text{face}" for face in ("", "bf", "it", "rm", "sf", "normal")} | {
    *(r"\mbox", r"\hbox", r"\mathrm", r"\mathbf", r"\mathit", r"\mathsf")
}
"""Commands whose argument is words."""

SPELLING = {
    **dict.fromkeys((r"\dfrac", r"\tfrac", r"\cfrac"), r"\frac"),
    **dict.fromkeys((r"\dbinom", r"\tbinom"), r"\binom"),
    **dict.fromkeys((r"\leq", r"\leqslant"), r"\le"),
    **dict.fromkeys((r"\geq", r"\geqslant"), r"\ge"),
    **dict.fromkeys((r"\times", r"\ast", "*"), r"\cdot"),
    **dict.fromkeys((r"\lvert", r"\rvert", r"\vert", r"\mid"), "|"),
    **dict.fromkeys((r"\dots", r"\cdots"), r"\ldots"),
    "sqrt": r"\sqrt",
    r"\neq": r"\ne",
    r"\lt": "<",
    r"\gt": ">",
    r"\div": "/",
    r"\colon": ":",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\lbrack": "[",
    r"\rbrack": "]",
    r"\varnothing": r"\emptyset",
    r"\lor": r"\text{or}",
    r"\land": r"\text{and}",
    "%": r"\%",
}
"""Tokens that mean the same."""
ARGUMENTS = {
    **dict.fromkeys((r"\frac", r"\binom"), 2),
    **dict.fromkeys((r"\sqrt", r"\overline", r"\bar", r"\vec", r"\hat", r"\overrightarrow", r"\pmod"), 1),
}
"""How many of them a command has."""
NAMED = {r"\begin", r"\end", r"\mathbb", r"\mathcal", r"\operatorname"}
"""Commands whose argument is a name: both are one token."""
OPENING = {"(", "[", "{", r"\{", r"\langle"}
CLOSING = {")", "]", "}", r"\}", r"\rangle"}
RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\approx")
TURNED = {">": "<", r"\ge": r"\le"}
MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array")

TRIGONOMETRY = ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh")
FUNCTIONS = frozenset(rf"\{name}" for name in (*TRIGONOMETRY, "log", "ln", "exp"))
OPERATORS = {*FUNCTIONS, "+", "-", "/", "^", "!", "|", r"\cdot", r"\pi", r"\infty", r"\frac", r"\sqrt"}
"""What makes a side of an equation more than a name."""

PLAIN = {
    **{command[1:]: command for command in (*FUNCTIONS - {r"\sec"}, r"\pi", r"\theta", r"\infty")},
    **dict.fromkeys(("infinity", "oo"), r"\infty"),
    **dict.fromkeys(("percent", "percentage", "pct"), r"\%"),
    **dict.fromkeys(("degree", "degrees", "deg"), r"\degree"),
}
"""Words that stand for a sign; "sec" for a second."""
CONNECTIVES = ("and", "or", "to")
SAME_UNIT = {
    name: names[0]
    for names in (
        ("inch", "inches", "in"),
        ("foot", "feet", "ft"),
        ("yard", "yards", "yd"),
        ("mile", "miles", "mi"),
        ("millimeter", "millimeters", "millimetres", "mm"),
        ("centimeter", "centimeters", "centimetres", "cm"),
        ("meter", "meters", "metre", "metres", "m"),
        ("kilometer", "kilometers", "kilometres", "km"),
        ("gram", "grams", "gm", "g"),
        ("kilogram", "kilograms", "kg"),
        ("ounce", "ounces", "oz"),
        ("pound", "pounds", "lb", "lbs"),
        ("second", "seconds", "sec", "s"),
        ("minute", "minutes", "min"),
        ("hour", "hours", "hr", "hrs", "h"),
        ("day", "days"),
        ("week", "weeks"),
        ("month", "months"),
        ("year", "years"),
        ("cent", "cents"),
        ("dollar", "dollars"),
        ("euro", "euros"),
        ("radian", "radians"),
    )
    for name in names
}
"""Units that must not be taken for each other. All others are ignored."""
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
NO_UNITS = {"am", "pm", "not", "times", "more", "less", "if", "for", "when", "is"}
"""Words that say something else about what stands before them."""
MOST_UNIT_WORDS = 4
SHORT_WORDS = {"am", "pm", "mph", "men", *CONNECTIVES, *(name for name in SAME_UNIT if 1 < len(name) < 4)}
"""Words so short that elsewhere they would be products of letters."""
UNIT_LETTERS = {name for name in SAME_UNIT if len(name) == 1}
"""Letters that are units among words."""
