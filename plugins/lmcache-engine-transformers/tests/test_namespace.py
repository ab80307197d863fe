"""Whatever decides the bytes of the KV decides the key; whatever does not, does not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import CHUNK, llama, prompt

from lmcache_core import NamespaceError
from lmcache_engine_transformers import PrefixCache, weights_digest

IDS = prompt(2 * CHUNK + 3)


def family_id(make: Any, model: Any, **options: Any) -> bytes:
    identity: bytes = make(model, **options).model_key(options.get("salt", "")).family.family_id
    return identity


def test_the_same_model_has_the_same_namespace_wherever_it_was_built(make: Any) -> None:
    assert family_id(make, llama()) == family_id(make, llama()) == family_id(make, copy.deepcopy(llama()))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (llama(), {"name": "other"}),
        (llama(), {"weights": "r1"}),
        (llama(), {"adapter": "lora@1"}),
        (llama(), {"chunk_tokens": 2 * CHUNK}),
        (llama(), {"salt": "tenant"}),
        (llama(), {"salt": "tenant", "key_secret": "s"}),
        (llama(seed=1), {}),
        (llama(torch.bfloat16), {}),
        (llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), {}),
        (llama(rope_parameters={"rope_type": "default", "rope_theta": 2e4}), {}),
        (llama(rms_norm_eps=1e-3), {}),
        (llama(attn_implementation="eager"), {}),
    ],
    ids=range(12),
)
def test_each_part_of_the_namespace_separates(make: Any, model: Any, options: dict[str, Any]) -> None:
    assert family_id(make, model, **options) != family_id(make, llama())


def test_salts_separate_with_and_without_a_secret(make: Any) -> None:
    ids = {
        family_id(make, llama(), salt=salt, key_secret=secret) for salt in ("", "a", "b") for secret in ("", "s", "t")
    }
    assert len(ids) == 1 + 2 * 3


def test_a_change_of_one_weight_changes_the_digest(model: Any) -> None:
    other = llama()
    assert weights_digest(other) == weights_digest(model)
    with torch.no_grad():
        other.model.layers[2].mlp.down_proj.weight[3, 5] += 1e-6
    assert weights_digest(other) != weights_digest(model)


def test_two_weights_that_change_places_change_the_digest(model: Any) -> None:
    other = llama()
    first, second = other.model.layers[0].self_attn, other.model.layers[1].self_attn
    first.q_proj, second.q_proj = second.q_proj, first.q_proj
    assert weights_digest(other) != weights_digest(model)


def test_tied_weights_are_told_from_equal_ones_by_the_config(make: Any) -> None:
    assert family_id(make, llama(tie_word_embeddings=True)) != family_id(make, llama())


def test_weights_that_change_later_are_noticed(make: Any) -> None:
    model = llama()
    prefix = make(model)
    prefix.generate(IDS, max_new_tokens=1)
    assert prefix.restore(IDS).hit_tokens == 2 * CHUNK
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    assert prefix.restore(IDS).hit_tokens == 0


def test_weights_that_change_after_the_caller_named_them_are_refused(make: Any) -> None:
    model = llama()
    prefix = make(model, weights="r1")
    model.load_state_dict(llama(seed=4).state_dict())
    with pytest.raises(NamespaceError, match="weights: the model changed"):
        prefix.generate(IDS, max_new_tokens=1)


def test_tenants_do_not_see_each_other(prefix: PrefixCache) -> None:
    prefix.generate(IDS, salt="alice", max_new_tokens=1)
    assert prefix.restore(IDS, salt="alice").hit_tokens == 2 * CHUNK
    assert prefix.restore(IDS, salt="bob").hit_tokens == 0
    assert prefix.restore(IDS).hit_tokens == 0


def test_a_model_without_a_name_says_what_to_give(make: Any) -> None:
    with pytest.raises(NamespaceError, match="model: .* give name="):
        make(llama(), name=None)


def test_the_folder_that_a_model_was_loaded_from_does_not_matter(make: Any, tmp_path: Any) -> None:
    from transformers import LlamaForCausalLM

    models = []
    for parent in ("a", "b"):
        folder = tmp_path / parent / "tiny"
        llama().save_pretrained(folder)
        models.append(LlamaForCausalLM.from_pretrained(folder).eval())
    one, two = (make(model, name=None).model_key().family for model in models)
    assert one == two
    assert one.model == "tiny"


def test_weights_that_are_not_in_memory_say_what_to_give() -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(NamespaceError, match="weights: .* not in memory .* give weights="):
        weights_digest(model)


class Adapted(torch.nn.Linear):
    """What peft's layers show of themselves."""

    active_adapters = ("fox",)
    disable_adapters = False
    merged = False


def adapted() -> Any:
    model = llama()
    model.model.layers[1].self_attn.q_proj.__class__ = Adapted
    return model


def test_active_adapters_must_be_named(make: Any) -> None:
    with pytest.raises(NamespaceError, match=r"adapter: the model has adapters \(fox\)"):
        make(adapted())
    assert family_id(make, adapted(), adapter="fox@1") != family_id(make, adapted(), adapter="fox@2")


def test_an_adapter_that_is_switched_later_is_noticed(make: Any) -> None:
    model = adapted()
    prefix = make(model, adapter="fox@1")
    prefix.generate(IDS, max_new_tokens=1)
    layer = model.model.layers[1].self_attn.q_proj
    assert prefix.restore(IDS).hit_tokens == 2 * CHUNK
    layer.disable_adapters = True
    assert prefix.restore(IDS).hit_tokens == 0
    layer.disable_adapters, layer.active_adapters = False, ["owl"]
    assert prefix.restore(IDS).hit_tokens == 0
