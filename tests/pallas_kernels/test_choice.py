"""Which implementation is chosen, and that refusals carry their reasons."""

import jax.numpy as jnp
import pytest

from pallas_kernels import AttentionLayer, AttentionSupport, GroupSpec, choose_attention
from pallas_kernels.implementation import Kernel, choose_kernel


class Picky:
    """Takes layers without a window, on NVIDIA GPUs."""

    support = AttentionSupport.SINGLE_TOKEN

    def __init__(self, name):
        self.name = name

    def refuses(self, layer, block_size, dtype, platform):
        if platform != "gpu":
            return f"needs an NVIDIA GPU, this is {platform}"
        if layer.window is not None:
            return f"no window ({layer.window})"
        if dtype != jnp.bfloat16:
            return f"no {dtype}"
        return None


class Easy(Picky):
    def refuses(self, layer, block_size, dtype, platform):
        return None


CANDIDATES = [Picky("picky"), Easy("easy")]
FULL = AttentionLayer("model.layers.0", 8, 2, 64, 0.125)
LOCAL = AttentionLayer("model.layers.1", 8, 2, 64, 0.125, window=512)


def choose(layers, platform="gpu", requested="auto", candidates=CANDIDATES, dtype=jnp.bfloat16):
    chosen, refusals = choose_attention(layers, 16, dtype, platform, requested, candidates)
    return chosen.name, refusals


def test_the_first_that_takes_every_layer_is_chosen():
    assert choose([FULL]) == ("picky", [])
    assert choose([FULL, LOCAL]) == ("easy", ["picky: layer 'model.layers.1': no window (512)"])
    assert choose([FULL], "cpu") == ("easy", ["picky: layer 'model.layers.0': needs an NVIDIA GPU, this is cpu"])
    assert choose([FULL], dtype="float32") == ("easy", ["picky: layer 'model.layers.0': no float32"])


def test_a_requested_one_is_never_replaced():
    assert choose([FULL], requested="easy") == ("easy", [])
    with pytest.raises(ValueError, match=r"'picky'.*picky: layer 'model.layers.1': no window \(512\)"):
        choose([FULL, LOCAL], requested="picky")
    with pytest.raises(ValueError, match="no implementation 'fast'; there is: auto, picky, easy"):
        choose([FULL], requested="fast")


def test_when_all_refuse_every_reason_is_given():
    with pytest.raises(ValueError, match="one: .*this is cpu; two: .*this is cpu"):
        choose([FULL], "cpu", candidates=[Picky("one"), Picky("two")])


def test_the_reference_takes_every_layer_everywhere():
    for platform in ("cpu", "gpu", "tpu"):
        chosen, refusals = choose_attention([FULL, LOCAL], 16, jnp.float16, platform, "reference")
        assert (chosen.name, chosen.support, refusals) == ("reference", AttentionSupport.ALWAYS, [])
    with pytest.raises(ValueError, match="reference: layer 'model.layers.0': .*not int8"):
        choose_attention([FULL], 16, jnp.int8, "cpu")


def test_kernels_that_are_functions_are_chosen_alike():
    kernels = [Kernel("fast", max, lambda: "no GPU"), Kernel("reference", min)]
    assert choose_kernel("thing", kernels) == (kernels[1], ["fast: no GPU"])
    with pytest.raises(ValueError, match=r"thing takes this case \(asked for 'fast'\). fast: no GPU"):
        choose_kernel("thing", kernels, "fast")


def test_static_facts_are_hashable_and_checked():
    assert len({FULL, LOCAL, GroupSpec(16, (FULL, LOCAL))}) == 3
    with pytest.raises(ValueError, match=r"'x': num_heads \(6\) must be a multiple of num_kv_heads \(4\)"):
        AttentionLayer("x", 6, 4, 64, 1.0)
