"""How much a text of JSON holds, told without making anything of it.

A decoder keeps every other thread waiting until it is done, seconds for millions of values. Counting takes a
hundredth of that, and the threads take turns meanwhile.
"""

from __future__ import annotations


def holds_more(content: bytes | bytearray, longest: int, others: int) -> bool:
    """Whether it has more than `others` texts, keys, lists and objects, or surely a list of more than `longest` values.

    What stands behind a list, up to the next one, is counted as part of it, and forgiven: it is of the others.
    """
    bare = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left is an end of a text
    texts = bare.count(b'"') // 2
    if texts > others:
        return True
    outside = b"".join(bare.split(b'"')[::2])
    if texts + outside.count(b"[") + outside.count(b"{") > others:
        return True
    return any(each.count(b",") > longest + others for each in outside.split(b"["))
