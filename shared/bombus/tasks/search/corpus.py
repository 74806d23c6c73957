"""Documents and questions: bundled ones, which are generated from one table, and those in the user's files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from bombus.json_lines import read_json_lines

FILE_BYTES_MAX = 256 << 20
KindT = TypeVar("KindT")


class SearchDocument(msgspec.Struct, frozen=True):
    """A document of the index."""

    title: str
    text: str


class SearchQuestion(msgspec.Struct, frozen=True):
    """A question and its accepted answers."""

    question: str
    answers: tuple[str, ...]


# country, capital, currency, official language, and a river that flows through the capital
_COUNTRIES = """
Austria|Vienna|euro|German|Danube
Belgium|Brussels|euro|Dutch, French and German|Senne
Bulgaria|Sofia|lev|Bulgarian|Perlovska
Czechia|Prague|koruna|Czech|Vltava
Egypt|Cairo|Egyptian pound|Arabic|Nile
France|Paris|euro|French|Seine
Germany|Berlin|euro|German|Spree
Hungary|Budapest|forint|Hungarian|Danube
Iraq|Baghdad|Iraqi dinar|Arabic and Kurdish|Tigris
Ireland|Dublin|euro|Irish and English|Liffey
Italy|Rome|euro|Italian|Tiber
Latvia|Riga|euro|Latvian|Daugava
Lithuania|Vilnius|euro|Lithuanian|Neris
Paraguay|Asunción|guaraní|Spanish and Guaraní|Paraguay
Poland|Warsaw|złoty|Polish|Vistula
Portugal|Lisbon|euro|Portuguese|Tagus
Romania|Bucharest|leu|Romanian|Dâmbovița
Russia|Moscow|Russian ruble|Russian|Moskva
Serbia|Belgrade|Serbian dinar|Serbian|Danube
Slovakia|Bratislava|euro|Slovak|Danube
Slovenia|Ljubljana|euro|Slovene|Ljubljanica
South Korea|Seoul|South Korean won|Korean|Han
Spain|Madrid|euro|Spanish|Manzanares
Sudan|Khartoum|Sudanese pound|Arabic and English|Nile
Thailand|Bangkok|baht|Thai|Chao Phraya
United Kingdom|London|pound sterling|English|Thames
Ukraine|Kyiv|hryvnia|Ukrainian|Dnieper
Vietnam|Hanoi|đồng|Vietnamese|Red River
"""


def bundled_documents() -> list[SearchDocument]:
    return [document for row in _rows() for document in _documents(*row)]


def bundled_questions() -> list[SearchQuestion]:
    """Return the bundled questions. Some kinds can be answered with one search, others need two."""
    rows = list(_rows())
    rivers = [river for *_, river in rows]
    return [
        question
        for country, capital, currency, _, river in rows
        for question in (
            SearchQuestion(f"What is the capital of {country}?", (capital,)),
            SearchQuestion(f"What is the currency of {country}?", (currency,)),
            SearchQuestion(f"Which river flows through {capital}?", (river,)),
            SearchQuestion(f"Which river flows through the capital of {country}?", (river,)),
            SearchQuestion(
                f"{capital} is the capital of a country. What is the currency of that country?", (currency,)
            ),
            *(
                [SearchQuestion(f"The {river} flows through the capital of which country?", (country,))]
                if rivers.count(river) == 1
                else []
            ),
        )
    ]


def read_documents(path: Path) -> list[SearchDocument]:
    """Return the documents in a file with one JSON object (`title` and `text`) per line. Raises `Refused` if the file
    cannot be used."""
    return read_json_lines(path, "document", _decoded(SearchDocument), bytes_max=FILE_BYTES_MAX)


def read_questions(path: Path) -> list[SearchQuestion]:
    """Return the questions in a file with one JSON object (`question` and `answers`) per line. Raises `Refused` if the
    file cannot be used."""
    return read_json_lines(path, "question", _decoded(SearchQuestion), bytes_max=FILE_BYTES_MAX)


def _rows() -> Iterator[tuple[str, str, str, str, str]]:
    for line in _COUNTRIES.strip().splitlines():
        country, capital, currency, language, river = line.split("|")
        yield country, capital, currency, language, river


def _documents(country: str, capital: str, currency: str, language: str, river: str) -> Iterator[SearchDocument]:
    yield SearchDocument(
        country,
        f"{country} is a country. Its capital is {capital}. The currency of {country} is the {currency}, and its "
        f"official language is {language}.",
    )
    yield SearchDocument(capital, f"{capital} is the capital of {country}. The river {river} flows through {capital}.")


def _decoded(kind: type[KindT]) -> Callable[[str, int], KindT]:
    return lambda line, number: msgspec.json.decode(line, type=kind)
