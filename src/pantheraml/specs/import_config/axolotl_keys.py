"""Keys of Axolotl that need nothing here, and keys for which there is nothing here: reason -> names."""

from __future__ import annotations

NOT_NEEDED = {
    "attention kernels are chosen automatically": (
        "attn_implementation flash_attention sdp_attention xformers_attention flex_attention sage_attention"
        " eager_attention flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp flash_attn_fuse_qkv"
        " flash_optimum flex_attn_compile_kwargs sdpa_varlen gemma4_hybrid_attn_impl fused_attn_kernel"
        " pretrain_multipack_attn"
    ),
    "fused kernels are chosen automatically (train.fused)": (
        "liger_rope liger_rms_norm liger_rms_norm_gated liger_layer_norm liger_glu_activation liger_swiglu"
        " liger_cross_entropy liger_fused_linear_cross_entropy liger_use_token_scaling cut_cross_entropy"
        " lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel unsloth_lora_mlp unsloth_lora_qkv"
        " unsloth_lora_o unsloth_cross_entropy_loss unsloth_rms_norm unsloth_rope use_kernels use_scattermoe"
        " use_sonicmoe experts_implementation chunked_cross_entropy use_dsv4_kernels use_glm_dsa_kernels tiled_mlp"
    ),
    "tokenized data is cached by its content (data.cache_dir)": (
        "dataset_prepared_path skip_prepare_dataset dataset_keep_in_memory"
    ),
    "padding bears no loss, and lengths are chosen automatically": "pad_to_sequence_len eval_batch_size",
    "the loss does not depend on how sequences are packed": (
        "eval_sample_packing multipack_real_batches sample_packing_eff_est sample_packing_seq_len_multiplier"
        " sample_packing_bin_size sample_packing_group_size total_num_tokens total_supervised_tokens"
    ),
    "loading and saving are the same either way": (
        "low_cpu_mem_usage save_safetensors tokenizer_use_fast tokenizer_legacy lora_fan_in_fan_out"
        " experimental_skip_move_to_device base_model_ignore_patterns is_llama_derived_model is_mistral_derived_model"
        " is_falcon_derived_model is_qwen_derived_model"
    ),
    "workers and prefetching are chosen automatically": (
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_drop_last"
    ),
    "the samples of a step depend on train.seed alone": "shuffle_merged_datasets shuffle_before_merging_datasets",
    "non-reentrant checkpointing is used where it can be": "gradient_checkpointing_kwargs",
    "columns that are not used are listed at the start": "remove_unused_columns",
    "the tokens of the machine are used (huggingface-cli login)": "hf_use_auth_token",
    "processes are started by pantheraml train (--nproc)": "local_rank ddp accelerator_config",
    "data is tokenized before the processes wait for each other; see parallel.timeout_seconds": "ddp_timeout",
    "read by older versions of Axolotl only": "torchdistx_path gptq_groupsize gptq_model_v1 push_dataset_to_hub",
}

NOT_SUPPORTED = {
    "weights other than the adapter's cannot be trained along with it": (
        "lora_modules_to_save unfrozen_parameters lora_layers_to_transform"
        " lora_layers_pattern lora_rank_pattern lora_alpha_pattern lora_bias"
    ),
    "an adapter is trained from its start; to continue one, merge it into the base model first": (
        "lora_model_dir peft_init_lora_weights loraplus_lr_ratio loraplus_lr_embedding"
    ),
    "a checkpoint of another trainer cannot be resumed; see pantheraml resume": (
        "resume_from_checkpoint auto_resume_from_checkpoints"
    ),
    "the tokenizer is used as it is: set model.tokenizer to a folder with the changed one": (
        "tokens added_tokens_overrides resize_token_embeddings_to_32x shrink_embeddings"
        " tokenizer_use_mistral_common default_system_message embeddings_skip_upcast"
    ),
    "the model's own config.json is used": (
        "overrides_of_model_config overrides_of_model_kwargs model_config rope_scaling cls_model_config reinit_weights"
    ),
    "images, audio and video are not read: the run trains on text": (
        "processor_type image_size image_resize_algorithm freeze_mm_modules processor_kwargs"
    ),
    "the guard of section `stability` watches losses and gradients (stability.on_spike)": (
        "loss_watchdog_threshold loss_watchdog_patience"
    ),
    "not a way to train here": (
        "relora relora_steps relora_warmup_steps relora_prune_ratio relora_cpu_offload jagged_restart_steps"
        " jagged_restart_warmup_steps jagged_restart_anneal_steps lisa_n_layers lisa_step_interval"
        " lisa_layers_attribute neftune_noise_alpha noisy_embedding_alpha diffusion ebft qat llmcompressor use_eaft"
        " eaft_alpha eaft_k use_onebitllms use_dynamic_finetuning lr_groups lr_quadratic_warmup lr_div_factor"
        " cosine_constant_lr_ratio embedding_lr embedding_lr_scale s2_attention eta_min optim_target_modules"
    ),
    "quantization is chosen by method.kind and model.precision": (
        "gptq gptq_disable_exllama bnb_config_kwargs peft quantize_moe_experts model_quantization_config"
        " model_quantization_config_kwargs llama4_linearized_experts nvfp4_merge_aware dsv4_fp4_grouped_mode"
        " fp8_enable_fsdp_float8_all_gather"
    ),
    "set model.precision=fp8 for fp8 on compute capability 9.0 or newer": "fp8",
    "experts are not divided over GPUs": (
        "expert_parallel_size expert_parallel_num_nvl_bytes expert_parallel_token_capacity"
    ),
    "rows are used as they are: prepare the file before": (
        "min_sample_len dataset_exact_deduplication group_by_length curriculum_sampling sample_packing_sequentially"
        " streaming streaming_multipack_buffer_size pretraining_sample_concatenation dataset_shard_num"
        " dataset_shard_idx eval_sequence_len"
    ),
    "start each node with pantheraml train --nnodes, --nproc (docs/launching.md)": (
        "use_ray ray_num_workers ray_run_name resources_per_worker"
    ),
    "set it in the environment of the tracker (such as WANDB_ENTITY)": (
        "wandb_entity wandb_name wandb_run_id wandb_watch wandb_log_model mlflow_tracking_uri mlflow_run_name"
        " hf_mlflow_log_artifacts trackio_run_name trackio_space_id"
    ),
    "not one of the trackers tensorboard, wandb, mlflow, trackio": (
        "use_comet comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode comet_online"
        " comet_experiment_config use_swanlab swanlab_project swanlab_experiment_name swanlab_description"
        " swanlab_mode swanlab_workspace swanlab_log_model swanlab_log_completions swanlab_completion_log_interval"
        " swanlab_completion_max_buffer use_otel_metrics otel_metrics_host otel_metrics_port"
    ),
    "evaluation here is the loss": (
        "eval_table_size eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval do_bench_eval"
    ),
    "upload the result yourself: pantheraml export, then hf upload": "hub_model_id hub_strategy hub_revision",
    "the number of samples per pass is chosen by the planner": "auto_find_batch_size",
    "torch.compile has one switch here (train.compile)": "torch_compile_mode torch_compile_backend",
    "unknown keys are always reported here": "strict",
    "a setting of the debugger, not of the run": "debug",
    "give it on the command line: --set stability.debug=true": "profiler_steps",
    "the packed length is data.seq_len": "max_packed_sequence_len",
}
