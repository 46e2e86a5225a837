"""Keys of a Hugging Face config.json: which Megatron argument each one is, and which say nothing.

A key that is in none of these tables may change layers or parameters.
"""

# Parts of a config.json that hold keys of the text model, the outer ones first.
PARTS = (
    *("thinker_config", "llm_config", "language_config", "text_config"),
    *("attn_config", "ffn_config"),
)
# Parts of a model that are not counted.
OTHER_PARTS = ("vision_config", "audio_config", "talker_config", "code2wav_config")
# Megatron's argument -> names of its key; the first that is present and not null is taken.
ALIASES = {
    "num-layers": "num_hidden_layers n_layers num_layers n_layer",
    "hidden-size": "hidden_size d_model n_embd",
    "num-attention-heads": "num_attention_heads n_heads n_head",
    "num-query-groups": "num_key_value_heads kv_n_heads num_kv_heads n_kv_heads n_head_kv "
    "num_attention_groups multi_query_group_num",
    "kv-channels": "head_dim attention_head_dim kv_channels",
    "num-experts": "n_routed_experts num_experts num_local_experts moe_num_experts num_moe_experts "
    "num_routed_experts",
    "moe-router-topk": "num_experts_per_tok moe_topk moe_top_k moe_k experts_per_token "
    "num_experts_per_token top_k_experts",
    "moe-ffn-hidden-size": "moe_intermediate_size expert_ffn_hidden_size moe_ffn_hidden_size "
    "expert_intermediate_size intermediate_size ffn_hidden_size",
    "ffn-hidden-size": "intermediate_size_mlp intermediate_size ffn_hidden_size",
    "moe-shared-expert-intermediate-size": "shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size",
    "moe-latent-size": "moe_latent_size",
    "moe-router-num-groups": "n_group num_expert_group",
    "moe-router-group-topk": "topk_group num_limited_groups",
    "moe-router-topk-scaling-factor": "routed_scaling_factor route_scale router_scaling_factor",
    "moe-aux-loss-coeff": "router_aux_loss_coef moe_loss_weight aux_loss_alpha aux_loss_coef",
    "hybrid-layer-pattern": "hybrid_override_pattern",
    "max-position-embeddings": "max_position_embeddings max_seq_len n_positions",
    "vocab-size": "vocab_size",
    "q-lora-rank": "q_lora_rank",
    "kv-lora-rank": "kv_lora_rank",
    "qk-head-dim": "qk_nope_head_dim",
    "qk-pos-emb-head-dim": "qk_rope_head_dim",
    "v-head-dim": "v_head_dim",
    "linear-attention-freq": "full_attention_interval",
    "linear-conv-kernel-dim": "linear_conv_kernel_dim",
    "linear-key-head-dim": "linear_key_head_dim",
    "linear-value-head-dim": "linear_value_head_dim",
    "linear-num-key-heads": "linear_num_key_heads",
    "linear-num-value-heads": "linear_num_value_heads",
    "mtp-num-layers": "num_nextn_predict_layers mtp_num_hidden_layers num_mtp_modules",
    "norm-epsilon": "rms_norm_eps layer_norm_eps norm_eps layer_norm_epsilon",
    "init-method-std": "initializer_range",
}
# The same for the Mamba-2 layers of a hybrid pattern; Megatron has no other kind of Mamba.
MAMBA_ALIASES = {
    "mamba-state-dim": "ssm_state_size mamba_d_state",
    "mamba-head-dim": "mamba_head_dim mamba_d_head",
    "mamba-num-groups": "n_groups mamba_n_groups",
    "mamba-num-heads": "mamba_num_heads mamba_n_heads",
}
SCORES = "scoring_func score_function score_func moe_router_activation_func"
NUM_SHARED = "n_shared_experts num_shared_experts moe_num_shared_experts num_shared_expert"
ACTIVATION = "mlp_hidden_act hidden_act hidden_activation activation_function"
ROTARY = "rope_parameters rope_scaling rope_theta partial_rotary_factor rotary_dim"
# Number of dense layers before the first with experts, and the period of layers with experts.
FIRST_DENSE = "first_k_dense_replace num_dense_layers moe_layer_num_skipped moe_layer_start_index"
STEPS = "decoder_sparse_step interleave_moe_layer_step moe_layer_interval"
# Numbers of the layers with experts, as a list or as a text with commas.
NUMBERED = "moe_layers moe_layers_enum"
OTHERS = (
    f"{FIRST_DENSE} {STEPS} {NUMBERED} {NUM_SHARED} {SCORES} mlp_layer_types moe_layer_freq "
    "moe_layer_end_index mlp_only_layers expert_layer_period expert_layer_offset layer_types "
    "layers_block_type topk_method norm_topk_prob tie_word_embeddings use_mtp "
    "attn_output_gate seq_aux multi_query use_routing_bias"
)
READ = {*PARTS, *" ".join([*ALIASES.values(), OTHERS, ACTIVATION, ROTARY]).split()}
# Read beside a hybrid pattern, of whose Mamba layers Megatron fixes the convolution.
READ_WITH_MAMBA = {*" ".join(MAMBA_ALIASES.values()).split(), "expand", "mamba_expand"}
FIXED_IN_MAMBA = {"conv_kernel": 4, "mamba_d_conv": 4, "mamba_hidden_act": "silu"}

# Kinds of layers in a list -> symbol of a hybrid pattern, for a list that names layers of experts.
LAYER_SYMBOLS = {
    **{"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"},
    **{"mlp": "-", "moe": "E"},
}
# Kinds of FFN in a list.
EXPERT_LAYERS, DENSE_LAYERS = {"sparse", "moe", "hash_moe"}, {"dense", "mlp"}
# Kinds of attention with the parameters of full attention.
SOFTMAX_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}

# Family -> keys with the values that its class takes where config.json leaves them out.
FAMILIES: dict[str, dict[str, object]] = {
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "dots1": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm4_moe": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm4v_moe": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "kimi_k2": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "nemotron_h": {
        **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "mlp_hidden_act": "relu2"},
    },
    "llama4": {"scoring_func": "sigmoid"},
    "gpt_oss": {"mlp_hidden_act": "gpt_oss"},
    "deepseek_v2": {"norm_topk_prob": False},
    "olmoe": {"norm_topk_prob": False},
    "qwen2_moe": {"norm_topk_prob": False},
    "qwen3_moe": {"norm_topk_prob": False},
    "jamba": {"expert_layer_period": 2, "expert_layer_offset": 1},
    "longcat_flash": {"scoring_func": "softmax"},
}
# Families whose attention has no positions.
NO_POSITIONS = {"jamba", "nemotron_h"}
# Family -> the part of its layers that no argument of Megatron describes.
UNLIKE_MEGATRON = {
    "arctic": "a dense FFN beside the experts of each layer",
    "deepseek_v4": "compressed attention",
    "jamba": "an FFN in each layer of Mamba",
    "jetmoe": "experts in the attention",
    "longcat_flash": "two attentions and two dense FFNs in each layer",
    "zamba2": "shared attention layers",
}

# Keys that change what is trained, but not its layers, nor its parameters by more than 1%.
_RUN_KEYS = (
    # Biases, norms and scales.
    "attention_bias qkv_bias use_qkv_bias add_qkv_bias use_bias mlp_bias lm_head_bias "
    "mamba_proj_bias mamba_conv_bias use_conv_bias "
    "use_qk_norm qk_norm qk_norm_type qk_layernorm qk_layer_norm clip_qkv swiglu_limit "
    "attention_multiplier embedding_multiplier logits_scaling residual_multiplier residual_in_fp32 "
    "attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar "
    "attn_temperature_tuning attn_scale floor_scale "
    # Attention.
    "sliding_window use_sliding_window sliding_window_pattern attention_chunk_size attn_type_list "
    "no_rope_layers no_rope_layer_interval original_max_position_embeddings rope_interleave "
    # Routing.
    "moe_use_aux_free router_jitter_noise input_jitter_noise "
    "moe_jitter_eps router_z_loss_coef moe_router_z_loss_coef num_hash_layers zero_expert_num "
    "zero_expert_type use_mixed_mlp_moe moe_shared_expert_overlap "
    # Dropout, and steps of Mamba.
    "attention_dropout hidden_dropout dropout embd_pdrop attn_pdrop resid_pdrop "
    "time_step_min time_step_max time_step_floor time_step_limit "
    # Layers of multi-token prediction, which are not counted anyway.
    "mtp_transformer_layers mtp_layers_block_type mtp_hybrid_override_pattern "
    "mtp_loss_scaling_factor"
)
RUN_KEYS = set(_RUN_KEYS.split())
# Keys that say nothing of what is planned or trained.
_HARMLESS = (
    "model_type architectures auto_map _name_or_path name_or_path transformers_version dtype "
    "torch_dtype use_cache cache_implementation return_dict output_attentions "
    "output_hidden_states output_router_logits output_logits torchscript is_encoder_decoder "
    "is_decoder num_logits_to_keep logits_to_keep pretraining_tp ep_size quantization_config "
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id mask_token_id "
    "decoder_start_token_id image_token_id image_token_index video_token_id audio_token_id "
    "vision_start_token_id vision_end_token_id boi_token_id boi_token_index eoi_token_id "
    "eoi_token_index eod_token_id im_start_id im_end_id text_start_id text_end_id "
    "tokenizer_class tokenizer_type id2label label2id problem_type max_window_layers "
    "use_mamba_kernels use_mambapy use_associative_scan mamba_ssm_cache_dtype "
    "rescale_prenorm_residual chunk_size mamba_chunk_size attn_implementation "
    "_attn_implementation use_flash_attention router_dtype moe_router_dtype"
)
HARMLESS = set(_HARMLESS.split())
HARMLESS.update(OTHER_PARTS)
