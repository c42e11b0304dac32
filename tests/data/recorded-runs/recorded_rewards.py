"""The reward of the recorded run: the share of the completion that is ASCII letters."""


def letters(prompts, completions, answers, infos):
    return [sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for text in completions]
