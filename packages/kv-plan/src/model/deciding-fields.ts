/** Field names that may decide a KV cache: layers, heads, sizes, windows, states, types. */
export const DECIDING_FIELDS: readonly RegExp[] = [
  /attn|attention/i,
  /^linear_|mamba|ssm|^conv|^kda_|^gdn_|^short_conv|recurrent|^state_|^lru_|^rglru|rwkv/i,
  /_interval$|_period$|_offset$|_pattern$|pattern_/,
  /chunk|window|shared|^share_|sparse|^index|indexer|compress|cross_|global_|latent|hybrid|^swa_|block_configs|block_types?$/i,
  /layer_types|layers_block_type|block_type|_layer_ids$|_layer_indices$|layer_indices$|_layer_list$|_layer_idxs?$|_attn_idxs$|_type_list$|layers_type/,
  /^kv_|_kv_|kv_heads|_kv$|head_dim|head_size|num_heads|_heads$|_head$|n_heads|key_value|multi_query|_query_group|lora_rank|v_head|_channels$/,
  /no_rope|nope|per_layer|is_encoder|is_decoder|encoder_|decoder_|new_decoder|cache_dtype|_dim_scale|loop|recur|(^|_)cla(_|$)/i,
];

/** Exceptions that decide no cache in any model. */
export const OTHER_FIELDS: ReadonlySet<string> = new Set(
  [
    `attention_bias attn_bias attention_dropout attn_dropout attn_pdrop attention_probs_dropout_prob attention_softmax_in_fp32
    scale_attention_softmax_in_fp32 scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn attn_logit_softcapping attn_logits_soft_cap
    attention_multiplier attention_scale attention_in_multiplier attention_out_multiplier attention_output_gate attn_output_gate attention_value_scale
    query_pre_attn_scalar attn_scale floor_scale attention_out_bias attention_qkv_bias attention_o_bias use_attention_bias qkv_bias use_qkv_bias
    attn_qkv_bias attn_temperature_tuning attn_scale_factor _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    attn_implementation _flash_attn_2_enabled use_flash_attn use_flash_attention use_flash_attn_rotary use_flash_attn_rmsnorm flash_attn_with_score
    apply_query_key_layer_scaling attention_type_vocab_size validate_attention_mask attention_layernorm attention_norm parallel_attn
    use_parallel_attention attention_head_dim_scale output_attentions output_router_logits add_cross_attention cross_attention_hidden_size use_cache
    is_decoder_only attention_projection_layout attn_moe_input_multiplier attention_gate_type rmsnorm_before_attention attn_layernorm`,
    `n_shared_experts num_shared_experts moe_num_shared_experts shared_expert_intermediate_size moe_shared_expert_intermediate_size
    shared_intermediate_size num_shared_expert moe_shared_expert_overlap shared_expert_gate shared_expert_rank shared_expert_score_func
    moe_router_use_shared shared_moe_mode use_shared_expert mtp_shared moe_shared_expert_gate decoder_sparse_step mlp_layer_types mlp_only_layers
    expert_layer_period expert_layer_offset moe_latent_size moe_layer_freq moe_layer_interval interleave_moe_layer_step moe_layer_start_index
    moe_layer_end_index block_sparse_moe sparse_mixer activation_sparsity_pattern moe_layers_enum moe_layers_enum_freq`,
    // Drafts: layers that only a speculative engine loads, and what a head reads of its target.
    `mtp_hybrid_override_pattern mtp_layers_block_type mtp_layer_types mtp_sliding_windows index_share_for_mtp_iteration
    eagle_aux_hidden_state_layer_ids`,
    // Mamba and short convolutions, without effect on the state.
    `mamba_proj_bias mamba_conv_bias mamba_chunk_size mamba_hidden_act mamba_inner_layernorms mamba_dt_rank mamba_dt_min mamba_dt_max mamba_dt_init_floor
    mamba_norm_before_gate mamba_rms_norm mamba_use_mlp use_mamba_kernels mamba_step mamba_dt_limit ssm_multipliers ssm_in_multiplier ssm_out_multiplier
    chunk_size chunk_size_feed_forward conv_bias conv_use_xavier_init conv_dim_out use_conv_bias use_associative_scan residual_in_fp32`,
    // Caches and attention of other programs, and positions.
    `latent_moe_use_norm pre_allocate_kv_cache pad_key_length full_attn_mod compression_ratio attn_res_block_size position_embedding_attention_offset`,
    `rope_interleave indexer_rope_interleave compress_rope_theta no_rope_layer_interval nope_rope_theta swa_rope_theta rope_local_base_freq
    global_rope_theta partial_rotary_factor global_partial_rotary_factor boi_token_index eoi_token_index eoa_token_index image_token_index
    video_token_index audio_token_index ignore_index vision_start_token_index pad_token_index image_split_id num_beam_groups num_reward_heads
    is_encoder_decoder use_unified_vision_chunk for_llm_compressor cache_implementation hidden_size_per_layer_input vocab_size_per_layer_input sparse_pred
    num_nextn_predict_layers mm_tunable_parts vision_feature_layer head_type interleave_sliding per_layer_input_gate sep_token_index`,
  ].flatMap((names) => names.split(/\s+/)),
);
