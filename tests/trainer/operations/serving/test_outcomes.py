"""What of a result goes onto the log."""

from math import inf, nan

from bombus.hive.events import AdapterShape, ModelShape, SavedWeights
from bombus.operations import (
    AdapterPart,
    AdapterSpec,
    Category,
    CheckpointKind,
    CheckpointSaved,
    EndModel,
    Failed,
    ModelEnded,
    ModelReady,
    SaveWeights,
    Scores,
    StepTaken,
)
from bombus_trainer.operations.serving.outcomes import metrics_of, saved_by, shape_of

SAVED = CheckpointSaved(
    checkpoint=CheckpointKind.SAMPLER, name="x", folder="/saved/m/sampler/x", address="ab", size_bytes=12
)
FAILED = Failed(error="no", category=Category.USER)


def test_figures_that_are_numbers_are_shown() -> None:
    scores = Scores(outputs=(), loss=2.5, tokens=3, metrics={"ratio:max": inf, "kl:sum": 0.5})
    assert metrics_of(scores) == {"loss": 2.5, "tokens": 3.0, "kl:sum": 0.5}
    assert metrics_of(StepTaken(step=1, divisor=4.0, grad_norm=nan)) == {"divisor": 4.0}
    assert metrics_of(FAILED) == {}


def test_a_model_is_shown_with_its_adapter_or_without_one() -> None:
    spec = AdapterSpec(rank=8, alpha=16.0, seed=3, parts=(AdapterPart.MLP,), targets=("up_proj",))
    shape = AdapterShape(rank=8, alpha=16.0, parts=("mlp",), targets=("up_proj",), seed=3)
    assert shape_of(ModelReady(adapter=spec, parameters=100)) == ModelShape(adapter=shape, parameters=100)
    assert shape_of(ModelReady(parameters=100)) == ModelShape(parameters=100)
    assert shape_of(FAILED) is None


def test_what_was_saved_is_kept_for_as_long_as_was_asked() -> None:
    kept = SavedWeights(use="sampler", name="x", folder="/saved/m/sampler/x", address="ab", size_bytes=12, ttl_s=60.0)
    save = SaveWeights(checkpoint=CheckpointKind.SAMPLER, name="x", ttl_s=60.0)
    assert saved_by(save, SAVED) == kept
    for ttl_s in (0.0, 60.0):
        ended = saved_by(EndModel(save_as="x", ttl_s=ttl_s), ModelEnded(saved=SAVED))
        assert ended is not None
        assert (ended.name, ended.ttl_s) == ("x", ttl_s)
    assert saved_by(EndModel(), ModelEnded()) is None
    assert saved_by(save, FAILED) is None
