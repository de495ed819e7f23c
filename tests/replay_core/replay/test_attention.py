import inspect
import warnings

import numpy as np
import pytest
import torch

from replay_core.errors import UnavailableError
from replay_core.replay import attention
from replay_core.replay.flags import Flags
from replay_core.replay.packing import Forward, arrange
from tests.replay_core.replay.conftest import small_batch

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@no_cuda
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("attention=fa2", "flash_attn is not installed.*CUDA only.*float16 and bfloat16 only"),
        ("attention=fa3 dtype=bf16", "flash_attn_interface is not installed"),
        ("attention=fa4 dtype=bf16", "flash_attn.cute is not installed"),
        ("attention=sdpa-cudnn", "CUDA only"),
        ("attention=sdpa-efficient", "CUDA only"),
        ("device=cuda", "no CUDA device"),
    ],
)
def test_what_cannot_run_here_says_why(flags, why):
    with pytest.raises(UnavailableError, match=why):
        attention.need(Flags.parse(flags))


def test_a_kernel_that_refuses_is_unavailable_and_not_failed():
    q = torch.zeros(1, 1, 4, 8)
    with (
        pytest.raises(UnavailableError, match="sdpa-cudnn cannot compute this batch"),
        attention.pinned(Flags("sdpa-cudnn")),
    ):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)


def test_scores_that_would_not_fit_are_forecast():
    long = np.zeros((1, 10_000_000), dtype=np.int8)
    with pytest.raises(UnavailableError, match="10,000,000 x 10,000,000 token pairs") as refused:
        attention.need_memory(Flags("eager"), [Forward(long, long, None)], heads=32)
    assert "GiB free" in str(refused.value)
    attention.need_memory(Flags("sdpa"), [Forward(long, long, None)], heads=32)


def test_the_explicit_block_mask_is_what_the_library_builds_from_positions():
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

    (forward,) = arrange(small_batch(), Flags(packing=True)).forwards
    positions = torch.from_numpy(forward.position_ids)
    config = LlamaConfig(attn_implementation="eager")
    embeds = torch.zeros(1, positions.shape[1], 4)
    # transformers 5.24 calls it by another name.
    cache = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
    library = create_causal_mask(
        config=config, inputs_embeds=embeds, attention_mask=None, position_ids=positions, **{cache: None}
    )
    assert attention.masks_by_positions()
    assert torch.equal(attention.additive_block_mask(positions, torch.float32), library)


TOLD_BY_TORCH = [
    "Memory efficient kernel not used because: (Triggered internally at /pytorch/aten/cuda/sdp_utils.cpp:986.)",
    "Memory efficient attention has been runtime disabled. (Triggered internally at /pytorch/sdp_utils_cpp.h:550.)",
    "Flash attention kernel not used because: (Triggered internally at /pytorch/aten/cuda/sdp_utils.cpp:988.)",
    "Flash Attention does not support non-null attn_mask. (Triggered internally at /pytorch/sdp_utils_cpp.h:253.)",
    "cuDNN attention kernel not used because: (Triggered internally at /pytorch/aten/cuda/sdp_utils.cpp:990.)",
    "cuDNN attention has been runtime disabled. (Triggered internally at /pytorch/aten/cuda/sdp_utils.cpp:700.)",
]


def test_of_what_torch_says_of_its_kernels_that_of_the_pinned_one_is_told():
    def forward():
        for line in TOLD_BY_TORCH:
            warnings.warn(line, stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    with pytest.raises(UnavailableError) as refused, attention.pinned(Flags.parse("attention=sdpa-flash device=cuda")):
        forward()
    assert refused.value.message == (
        "sdpa-flash cannot compute this batch on cuda: Flash Attention does not support non-null attn_mask"
    )
    assert "rows_per_forward=1" in refused.value.hint


def test_the_efficient_kernel_gets_repeated_keys_as_it_takes_no_groups():
    sdpa_attention = pytest.importorskip("transformers.integrations.sdpa_attention")
    k_BHTD = torch.zeros(1, 2, 4, 8)
    before = sdpa_attention.use_gqa_in_sdpa(None, k_BHTD, k_BHTD)
    with attention.pinned(Flags("sdpa-efficient")):
        assert sdpa_attention.use_gqa_in_sdpa(None, k_BHTD, k_BHTD) is False
    assert sdpa_attention.use_gqa_in_sdpa(None, k_BHTD, k_BHTD) is before is True
