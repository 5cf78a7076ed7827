"""Keys of LLaMA-Factory that need nothing here, and keys for which there is nothing here: reason -> names."""

from __future__ import annotations

NOT_NEEDED = {
    "attention kernels are chosen automatically": "flash_attn disable_shifting",
    "fused kernels are chosen automatically (train.fused)": (
        "enable_liger_kernel use_unsloth use_unsloth_gc use_v1_kernels bias_activation_fusion apply_rope_fusion"
        " masked_softmax_fusion cross_entropy_loss_fusion moe_grouped_gemm"
    ),
    "tokenized data is cached by its content (data.cache_dir)": (
        "overwrite_cache tokenized_path preprocessing_batch_size data_shared_file_system"
    ),
    "report.html plots the loss": "plot_loss",
    "to replace an earlier run, add --overwrite to the command": "overwrite_output_dir",
    "workers and prefetching are chosen automatically": (
        "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers"
    ),
    "data is tokenized before the processes wait for each other; see parallel.timeout_seconds": "ddp_timeout",
    "the micro-batch of evaluation is chosen automatically": "per_device_eval_batch_size eval_accumulation_steps",
    "loading and saving are the same either way": (
        "low_cpu_mem_usage use_fast_tokenizer save_safetensors include_num_input_tokens_seen"
        " include_tokens_per_second remove_unused_columns print_param_status logging_dir logging_first_step"
        " disable_tqdm log_level"
    ),
    "non-reentrant checkpointing is used where it can be": "use_reentrant_gc gradient_checkpointing_kwargs",
    "padding bears no loss": "ignore_pad_token_for_loss",
    "scales of nf4 weights have their own format here": "double_quantization",
    "a setting of generation or export, not of training": (
        "infer_backend infer_dtype max_new_tokens temperature top_p top_k do_sample num_beams export_size export_device"
        " export_legacy_format use_kv_cache offload_folder predict_with_generate do_predict"
    ),
}

NOT_SUPPORTED = {
    "all rows are used: cut the file, or set train.max_steps": "max_samples",
    "weights other than the adapter's cannot be trained along with it": "additional_target",
    "an adapter is trained from its start; to continue one, merge it into the base model first": (
        "adapter_name_or_path adapter_folder create_new_adapter"
    ),
    "not a way to train here": (
        "loraplus_lr_ratio loraplus_lr_embedding pissa_init pissa_iter pissa_convert use_galore galore_target"
        " galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise use_apollo apollo_target"
        " apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type apollo_scale_type"
        " apollo_layerwise apollo_scale_front use_badam badam_mode badam_start_block badam_switch_mode"
        " badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose use_adam_mini use_muon use_llama_pro"
        " freeze_trainable_layers freeze_trainable_modules freeze_extra_modules use_dft_loss use_asft_loss asft_alpha"
        " use_eaft_loss eaft_alpha neftune_noise_alpha mixture_of_depths shift_attn moe_aux_loss_coef"
        " label_smoothing_factor disable_dropout oft_block_size oft_target oft_rank module_dropout"
    ),
    "belongs to another stage than sft": (
        "pref_beta pref_loss pref_ftx dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ref_model"
        " ref_model_adapters reward_model reward_model_adapters ppo_buffer_size ppo_epochs ppo_score_norm ppo_target"
    ),
    "the loss is on the answers only, with the whole conversation before them": "train_on_prompt mask_history",
    "rows are used as they are: prepare the file before": (
        "streaming buffer_size mix_strategy interleave_probs group_by_length"
    ),
    "the chat template of the tokenizer decides": ("tool_format default_system enable_thinking preserve_thinking"),
    "the tokenizer is used as it is: set model.tokenizer to a folder with the changed one": (
        "resize_vocab add_tokens add_special_tokens new_special_tokens_config init_special_tokens split_special_tokens"
    ),
    "the model's own config.json is used": "rope_scaling",
    "images, audio and video are not read: the run trains on text": (
        "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen media_dir"
        " audio_sampling_rate freeze_vision_tower freeze_multi_modal_projector freeze_language_model"
        " use_audio_in_video image_do_pan_and_scan crop_to_patches"
    ),
    "layer norms and logits are in fp32 where the kernels need it": "upcast_layernorm upcast_lmhead_output",
    "quantization is chosen by method.kind and model.precision": "quantization_device_map",
    "set model.precision=fp8 for fp8 on compute capability 9.0 or newer": (
        "fp8 fp8_backend fp8_enable_fsdp_float8_all_gather"
    ),
    "experts on the host (KTransformers) are not supported": (
        "use_kt kt_config kt_cpu_activation kt_weight_path kt_non_expert_weight_path kt_expert_checkpoint_path"
    ),
    "set parallel.tensor, pipeline, context or shard (docs/parallelism.md)": (
        "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size"
        " context_parallel_size expert_model_parallel_size sequence_parallel use_distributed_optimizer"
        " overlap_param_gather overlap_grad_reduce use_packed_sequences moe_token_dispatcher_type"
        " recompute_granularity recompute_method recompute_num_layers mixed_precision export_hf_on_finish"
    ),
    "a checkpoint of another trainer cannot be resumed; see pantheraml resume": "resume_from_checkpoint",
    "start each node with pantheraml train --nnodes, --nproc (docs/launching.md)": (
        "ray_num_workers ray_run_name ray_storage_path resources_per_worker placement_strategy ray_init_kwargs"
        " master_addr master_port"
    ),
    "set it in the environment of the tracker (such as WANDB_NAME)": "run_name",
    "not one of the trackers tensorboard, wandb, mlflow, trackio": (
        "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir"
        " swanlab_lark_webhook_url swanlab_lark_secret"
    ),
    "evaluation here is the loss": "compute_accuracy eval_num_beams eval_on_each_dataset",
    "upload the result yourself: pantheraml export, then hf upload": (
        "push_to_hub hub_model_id hub_private_repo export_hub_model_id"
    ),
    "the tokens of the machine are used (huggingface-cli login)": "hf_hub_token ms_hub_token om_hub_token",
    "set HF_HOME for the cache of models": "cache_dir",
    "use pantheraml export for this": (
        "export_dir export_quantization_bit export_quantization_dataset export_quantization_nsamples"
        " export_quantization_maxlen"
    ),
}
