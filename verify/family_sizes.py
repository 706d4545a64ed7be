"""The sizes that make a config small, by attribute name, and the few types that need more than that."""

from __future__ import annotations

from typing import Any

POSITION_SCALE = 80
SMALL: dict[str, Any] = {
    # widths
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embedding_size": 64,
    "embed_dim": 64,
    "emb_dim": 64,
    "embedding_dim": 64,
    "word_embed_proj_dim": 64,
    "input_embedding_size": 64,
    "output_embedding_size": 64,
    "backbone_hidden_size": 64,
    "hidden_size_global": 64,
    "adapter_out_dim": 64,
    "pronunciation_embed_dim": 16,
    "shape_embed_dim": 16,
    "hidden_size_per_layer_input": 16,
    "lru_width": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "d_ff": 96,
    "dff": 96,
    "dim_ff": 96,
    "d_inner": 96,
    "n_inner": 96,
    "mlp_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "moe_intermediate_size": 32,
    "expert_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "prefix_dense_intermediate_size": 96,
    "expert_ffn_hidden_size": 32,
    "router_hidden_size": 32,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "num_heads": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "num_query_groups": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "dim_head": 16,
    "d_head": 16,
    "attention_head_size": 16,
    "kv_channels": 16,
    "swa_head_dim": 16,
    "global_head_dim": 16,
    "rotary_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 8,
    "index_topk_blocks": 2,
    "index_block_size": 4,
    "query_pre_attn_scalar": 16,
    # depths
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_blocks": 2,
    "depth": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    # experts: as many per token as there are
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "num_experts_per_token": 4,
    "top_k_experts": 4,
    "moe_topk": 4,
    "moe_top_k": 4,
    "moe_k": 4,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    # state space and convolution mixers
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "n_mamba_heads": 2,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # vocabulary and lengths
    "vocab_size": 512,
    "unpadded_vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "decoder_vocab_size": 512,
    "shape_vocab_size": 512,
    "pronunciation_vocab_size": 512,
    "ngram_vocab_size_base": 512,
    "encoder_hash_byte_group_vocab": 512,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    "context_length": 256,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_window_size": 8,
    "window_size": 8,
    "local_attention_window_len": 8,
    "keep_window_size": 8,
    "use_sliding_window": True,
    "local_attention": 16,  # both sides together
    "attention_chunk_size": 64,
    # Scales that set in at a position: one that the paths of a small batch do not reach, but its rows do.
    "floor_scale": POSITION_SCALE,
    "log_scaling_n_floor": POSITION_SCALE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "add_cross_attention": False,
}

# Sizes that are given also where a config leaves them None: some models need them, and no other minds.
WHERE_NONE = frozenset(
    {
        "head_dim",
        "num_key_value_heads",
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts",
        "num_experts_per_tok",
        "sliding_window",
    }
)

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_QSA = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_SLIDING_LATENT = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 24,
    "swa_qk_rope_head_dim": 8,
    "swa_v_head_dim": 16,
}

# What the rules above and in `families` do not reach, by type: config arguments, those of a sub-config nested.
HINTS: dict[str, dict[str, Any]] = {
    # Its default has no attention layer, and a hybrid cache without one raises.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "blt": {"num_hidden_layers": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    # Read from the attention sub-config, which does not declare it.
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    # One layer in, two that are run twice, one out.
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    # Its sliding layers have sizes of their own, and its encoders are checked against each other.
    "dots3_note": {
        "text_config": _SLIDING_LATENT,
        "vision_config": {"adapter_in_dim": 64},
        "audio_config": {"adapter_input_size": 64},
    },
    "dots3_note_text": _SLIDING_LATENT,
    # Every layer up to the second would be dense.
    "flint": {"mlp_only_layers": [0]},
    # Its four kinds of layer, the last two reading the keys of the first two. At its own 95% sparsity so few of 96
    # activations are left that rounding alone moves the result by 1e-5.
    "gemma3n_text": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.75, 0.75, 0.0, 0.0]},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 2,
        }
    },
    # [kinds, times]
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    # Experts that do nothing are chosen among the others: all six of them.
    "longcat_flash": {"zero_expert_num": 2, "moe_topk": 6},
    # heads * head_dim has to be twice the hidden size
    "mamba2": {"num_heads": 8},
    # Of its layers, only these attend to images.
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}},
    # Its router always takes two.
    "phimoe": {"num_local_experts": 2, "num_experts_per_tok": 2},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    # The two axes of its positions have to multiply to the length and add up to the hidden size.
    "reformer": {"axial_pos_shape": (16, 16), "axial_pos_embds_dim": (16, 48)},
    # Its cache takes the width of a key rounded up to 64, its blocks take it as it is.
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    # The blocks after the first hybrid one are tied to it.
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    # One expert a token is all it has: with one expert, no rounding can choose another.
    "zaya": {
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 2,
        "layer_types": ["hybrid", "hybrid_sliding"],
    },
}
