"""Episode keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bombus.errors import Code, Refused
from bombus_gateway.keys import KeyClaims, Keys

KEYS = Keys(b"0123456789abcdef0123456789abcdef")
KEY = KEYS.sign("main", 3, "main-3-7", 1000)


def test_a_key_has_the_claims_that_it_was_signed_with() -> None:
    assert KEY.startswith("sk-bombus-")
    assert KEYS.verify(KEY, 999) == KeyClaims("main", 3, "main-3-7", 1000)


def test_r18_a_key_expires_and_says_so() -> None:
    with pytest.raises(Refused, match="expired") as refused:
        KEYS.verify(KEY, 1000)
    assert refused.value.code == Code.KEY_EXPIRED


def test_r18_a_key_that_was_verified_before_expires_all_the_same() -> None:
    keys = Keys(b"0123456789abcdef0123456789abcdef")
    assert keys.verify(KEY, 999) == keys.verify(KEY, 998)
    with pytest.raises(Refused, match="expired"):
        keys.verify(KEY, 1000)


def test_a_key_of_another_hive_is_refused() -> None:
    with pytest.raises(Refused, match="not signed") as refused:
        Keys(b"another secret of enough bytes..").verify(KEY, 0)
    assert refused.value.code == Code.BAD_KEY


@given(st.integers(10, len(KEY) - 2), st.sampled_from("aZ0-_"))  # only some bits of the last one count
def test_a_key_with_one_character_changed_is_refused(place: int, letter: str) -> None:
    changed = KEY[:place] + letter + KEY[place + 1 :]
    if changed == KEY:
        return
    with pytest.raises(Refused) as refused:
        KEYS.verify(changed, 0)
    assert refused.value.code == Code.BAD_KEY


@given(st.text(max_size=60))
def test_any_other_text_is_refused(text: str) -> None:
    for key in (text, "sk-bombus-" + text):
        with pytest.raises(Refused):
            KEYS.verify(key, 0)
