"""Keys, episode ids and links, signed with the hive's secret so that any gateway can verify them without a look-up.

An episode's key is for its agent: `sk-bombus-`, the claims, and an HMAC of the claims. The id of a claimed episode is
for the client that claimed it: the episode's name on the log, a dot, and an HMAC of the name. A link to a checkpoint
consists of its target and an HMAC of the target. Replicas recognize gateways by a key derived from the same secret.
"""

import binascii
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode

import msgspec

from bombus.errors import Code, Refused
from bombus.hive.bounded import trim
from bombus.hive.episodes import KEY_PREFIX, SECRET_MARK, without_secret
from bombus.hive.generation import replica_key

MAC_BYTES = 16
KEY_CHARACTERS_MAX = 512
VERIFIED_MAX = 4096  # maximum number of keys whose claims are cached
_CLAIMED = b"claimed episode "  # no key's claims begin with this, so the two HMACs cannot be confused
_LINK = b"link "  # no key's claims begin with this either
LINK_CHARACTERS_MAX = 2048


class KeyClaims(msgspec.Struct, frozen=True, array_like=True):
    """What a key allows: calls of one episode. `expires_ns` is in nanoseconds since the epoch."""

    engine: str
    run: int
    episode: str
    expires_ns: int


_decoder = msgspec.msgpack.Decoder(KeyClaims)


class Keys:
    """Signs and verifies keys with the hive's secret, using HMAC-SHA256 truncated to 16 bytes."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MAC_BYTES:
            raise ValueError(f"the secret that signs keys has {len(secret)} bytes: at least {MAC_BYTES} are needed")
        self._secret = secret
        self.for_replicas = replica_key(secret)
        self._verified: dict[str, KeyClaims] = {}  # a signature stays valid; the expiry is checked every time

    def sign(self, engine: str, run: int, episode: str, expires_ns: int) -> str:
        claims = msgspec.msgpack.encode(KeyClaims(engine, run, episode, expires_ns))
        return KEY_PREFIX + urlsafe_b64encode(claims + self._mac(claims)).rstrip(b"=").decode()

    def verify(self, key: str, now_ns: int) -> KeyClaims:
        """Return the claims of a key. Raises `Refused` BAD_KEY unless this hive signed it, and KEY_EXPIRED if it has
        expired."""
        found = self._verified.get(key)
        if found is None:
            found = self._verified[key] = self._signed_claims(key)
            trim(self._verified, VERIFIED_MAX)
        if now_ns >= found.expires_ns:
            raise Refused(Code.KEY_EXPIRED, f"The key of episode {found.episode} has expired. {_CLAIM}")
        return found

    def _signed_claims(self, key: str) -> KeyClaims:
        if not key.startswith(KEY_PREFIX) or len(key) > KEY_CHARACTERS_MAX:
            raise Refused(Code.BAD_KEY, f"This is not an episode's key, which starts with {KEY_PREFIX!r}. {_CLAIM}")
        text = key[len(KEY_PREFIX) :]
        try:
            signed = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except (binascii.Error, ValueError):
            raise Refused(Code.BAD_KEY, f"This key is damaged. {_CLAIM}") from None
        claims, mac = signed[:-MAC_BYTES], signed[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(claims)):
            raise Refused(Code.BAD_KEY, f"This key was not signed by this hive. {_CLAIM}")
        return _decoder.decode(claims)

    def claimed_id(self, episode: str) -> str:
        """Return the id under which the answer to a claim names an episode.

        The client needs this id to end, abort, touch and replay the episode. The agent cannot derive the id from the
        episode's key.
        """
        secret = urlsafe_b64encode(self._mac(_CLAIMED + _bytes(episode))).rstrip(b"=").decode()
        return f"{episode}{SECRET_MARK}{secret}"

    def episode_of(self, claimed_id: str) -> str:
        """Return the log's name for the episode with this claimed id.

        Raises `Refused` NOT_YOUR_EPISODE for any other id, whether or not such an episode exists.
        """
        episode = without_secret(claimed_id)
        if not hmac.compare_digest(_bytes(claimed_id), _bytes(self.claimed_id(episode))):
            raise Refused(
                Code.NOT_YOUR_EPISODE,
                "This is not the id of an episode that this client has claimed: send `episode_uuid` as the claim "
                "returned it, with the secret after its dot.",
            )
        return episode

    def sign_link(self, target: bytes) -> str:
        """Return the text of a link to `target`. A link cannot be forged, and following it requires no key."""
        return urlsafe_b64encode(target + self._mac(_LINK + target)).rstrip(b"=").decode()

    def linked(self, link: str) -> bytes:
        """Return the target of a link. Raises `Refused` BAD_KEY unless this hive signed it."""
        try:
            signed = urlsafe_b64decode(link + "=" * (-len(link) % 4)) if len(link) <= LINK_CHARACTERS_MAX else b""
        except (binascii.Error, ValueError):
            signed = b""
        target, mac = signed[:-MAC_BYTES], signed[-MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(_LINK + target)):
            raise Refused(Code.BAD_KEY, "This link was not made by this hive, or is damaged: ask for another one.")
        return target

    def _mac(self, claims: bytes) -> bytes:
        return hmac.digest(self._secret, claims, "sha256")[:MAC_BYTES]


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


_CLAIM = "Claim an episode and use the key that comes with it."
