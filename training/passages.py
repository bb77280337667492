"""Real texts as material for prompts: to be summarised, questioned, rewritten or translated.

Knows: how plain text is cut into passages. Does not know what is asked about them (`prompts`).
"""

import re
from collections.abc import Iterable
from pathlib import Path


def read_passages(paths: Iterable[str | Path], characters: int = 2500) -> list[str]:
    """Passages of about so many characters, whole paragraphs each, in the order of the files.

    Paragraphs are separated by empty lines; those of less than a sentence (headings, page numbers) are left out.

    Raises:
        ValueError: a file holds no paragraph, or is not UTF-8 text.
    """
    passages: list[str] = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not plain text in UTF-8") from None
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
        paragraphs = [part for part in paragraphs if len(part) > 60 and part.rstrip("\"')”»").endswith((".", "!", "?"))]
        if not paragraphs:
            raise ValueError(f"{path} holds no paragraphs of plain text")
        passage = ""
        for paragraph in paragraphs:
            passage = f"{passage} {paragraph}".strip()
            if len(passage) >= characters:
                passages.append(passage)
                passage = ""
        if passage:
            passages.append(passage)
    return passages
