"""A ranked in-memory index of documents: BM25 (Robertson and Zaragoza 2009, equation 3.15) over words."""

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from bombus.tasks.search.corpus import SearchDocument

K1, B = 1.2, 0.75

_WORD = re.compile(r"\w+")


class LocalIndex:
    """Finds the documents whose title and text best match a query."""

    def __init__(self, documents: Sequence[SearchDocument]) -> None:
        self.documents = list(documents)
        self._lengths: list[int] = []
        self._found_in: dict[str, list[tuple[int, int]]] = defaultdict(list)  # word -> (document, occurrences)
        for number, document in enumerate(self.documents):
            words = Counter(words_of(f"{document.title} {document.text}"))
            self._lengths.append(words.total())
            for word, count in words.items():
                self._found_in[word].append((number, count))
        self._mean = sum(self._lengths) / len(self._lengths) if self._lengths else 1.0

    def search(self, query: str, count: int) -> list[SearchDocument]:
        """Return at most `count` documents that share a word with the query, best first."""
        scores = self.scores(query)
        best = heapq.nsmallest(count, scores, key=lambda number: (-scores[number], number))
        return [self.documents[number] for number in best]

    def scores(self, query: str) -> dict[int, float]:
        """Return the score of each document that shares a word with the query, by document number."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(words_of(query)):
            found = self._found_in.get(word, ())
            weight = math.log(1 + (len(self.documents) - len(found) + 0.5) / (len(found) + 0.5))
            for number, often in found:
                norm = K1 * (1 - B + B * self._lengths[number] / self._mean)
                scores[number] += weight * often * (K1 + 1) / (often + norm)
        return scores


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
