"""The rules for which sessions, models, saved models and endpoints the holder of a client key may use.

An owner is the name of the key that opened a session. A key without a name may use every object, and every key may use
the objects that were created with a nameless key. If a key may not use an object, the answer is as if the object did
not exist, so that the object's name reveals nothing.
"""

import msgspec

from bombus.hive.operations.state import ClientModel, KeptWeights, TrainingClients, TrainingSession


def may_use(owner: str, holder: str) -> bool:
    """Return whether the holder of a key may use objects that belong to `owner`."""
    return not holder or owner in ("", holder)


def may_read(kept: KeptWeights, holder: str) -> bool:
    """Return whether the holder of a key may load a saved model. A published model may be loaded with any key."""
    return kept.noted.public or may_use(kept.noted.owner, holder)


def owner_of(clients: TrainingClients, model: ClientModel) -> str:
    """Return the owner of a model, which is the owner of its session."""
    session = clients.sessions.get(model.session)
    return "" if session is None else session.owner


def seen_session(clients: TrainingClients, name: str, holder: str) -> TrainingSession | None:
    session = clients.sessions.get(name)
    return session if session is not None and may_use(session.owner, holder) else None


def seen_model(clients: TrainingClients, name: str, holder: str) -> ClientModel | None:
    model = clients.models.get(name)
    return model if model is not None and may_use(owner_of(clients, model), holder) else None


def seen_by(clients: TrainingClients, holder: str) -> TrainingClients:
    """Return the objects that the holder of a key may list. The holder may also load models that others have
    published."""
    if not holder:
        return clients
    return msgspec.structs.replace(
        clients,
        sessions={name: each for name, each in clients.sessions.items() if may_use(each.owner, holder)},
        models={name: each for name, each in clients.models.items() if may_use(owner_of(clients, each), holder)},
        kept={name: each for name, each in clients.kept.items() if may_use(each.noted.owner, holder)},
        endpoints={name: each for name, each in clients.endpoints.items() if may_use(each.owner, holder)},
    )


def is_anothers_name(clients: TrainingClients, name: str, holder: str) -> bool:
    """Return whether a model of this name, or any model saved from it, belongs to another owner."""
    is_seen = name not in clients.models or seen_model(clients, name, holder) is not None
    of_name = (each for each in clients.kept.values() if each.noted.model == name)
    return not is_seen or not all(may_use(each.noted.owner, holder) for each in of_name)
