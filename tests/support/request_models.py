"""The names of the fields that other projects' request models have, as those stood in November 2026.

`tests/web/wire/test_field_table.py` checks that each has a row in `web/wire/fields.py`. To follow a project, add its
new names here.
"""

from __future__ import annotations

from collections.abc import Mapping

from web.wire.fields import Place

NAMES: Mapping[tuple[str, Place], str] = {
    ("OpenAI, chat completions", "generate"): """
        messages model audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens
        max_tokens metadata modalities moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
        prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed
        service_tier stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity
        web_search_options""",
    ("OpenAI, completions", "generate"): """
        model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options suffix temperature top_p user""",
    ("OpenAI, responses", "generate"): """
        background background_options context_management conversation include input instructions max_output_tokens
        max_tool_calls metadata model moderation parallel_tool_calls previous_response_id prompt prompt_cache_key
        prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store stream
        stream_options temperature text tool_choice tools top_logprobs top_p truncation user""",
    ("OpenAI", "stream_options"): "include_usage include_obfuscation",
    ("OpenAI", "message"): "role content name audio function_call refusal annotations tool_calls tool_call_id",
    ("vLLM, chat completions", "generate"): """
        messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
        presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
        reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p
        repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
        skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
        logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
        add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
        structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
        routed_experts_prompt_start return_token_offsets return_prompt_text return_mm_kwargs cache_salt
        kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval""",
    ("vLLM, completions", "generate"): """
        model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking
        length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
        logprob_token_ids bad_words prompt_embeds add_special_tokens response_format structured_outputs priority
        request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
        return_token_offsets return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
        repetition_detection thinking_token_budget stream_interval""",
    ("vLLM, before 0.12", "generate"): """
        best_of guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
        structural_tag logits_processors early_stopping""",
    ("vLLM", "stream_options"): "include_usage continuous_usage_stats",
    ("vLLM", "message"): "role content name tool_call_id tool_calls reasoning reasoning_content",
    ("vLLM", "tokenize"): """
        model prompt messages add_special_tokens return_token_strs add_generation_prompt continue_final_message
        chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools""",
    ("vLLM", "detokenize"): "model tokens",
    ("SGLang, chat completions", "generate"): """
        messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
        presence_penalty response_format seed stop stream stream_options temperature top_p user tools tool_choice
        parallel_tool_calls return_hidden_states return_routed_experts routed_experts_start_len
        return_cached_tokens_details return_spec_tokens_details return_prompt_token_ids return_token_ids
        return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask
        sampling_logprobs_mode return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 reasoning_effort
        thinking task top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim
        ignore_eos continue_final_message skip_special_tokens lora_path session_id session_params separate_reasoning
        stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video images_config
        video_config mm_processor_kwargs custom_logit_processor custom_params watermark input_ids rid extra_key
        cache_salt priority data_parallel_rank bootstrap_host bootstrap_port bootstrap_room""",
    ("SGLang, completions", "generate"): """
        model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
        stream_options suffix temperature top_p user return_hidden_states return_routed_experts
        routed_experts_start_len return_cached_tokens_details return_spec_tokens_details return_token_ids top_k min_p
        min_tokens json_schema regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos
        skip_special_tokens lora_path session_id session_params response_format custom_params custom_logit_processor
        watermark images_config mm_processor_kwargs data_parallel_rank rid extra_key cache_salt priority
        custom_labels""",
    ("SGLang, /generate", "generate"): """
        rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes mm_content_hashes
        use_audio_in_video video_config sampling_params watermark return_logprob logprob_start_len top_logprobs_num
        token_ids_logprob return_sampling_mask sampling_logprobs_mode return_text_in_logprobs
        return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 stream
        log_metrics return_hidden_states return_routed_experts routed_experts_start_len return_indexer_topk modalities
        session_params lora_path lora_id custom_logit_processor positional_embed_overrides bootstrap_host
        bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank
        disagg_prefill_dp_rank routing_key conversation_id background require_reasoning max_thinking_tokens priority
        extra_key no_logs custom_labels return_bytes return_entropy return_prompt_token_ids external_trace_header
        received_time need_wait_for_mm_inputs num_items_assigned encoder_urls max_dynamic_patch min_dynamic_patch
        image_max_dynamic_patch video_max_dynamic_patch images_config mm_processor_kwargs multi_item_delimiter_indices
        token_indices_to_pool cache_salt kv_hints""",
    ("SGLang, sampling_params", "generate"): """
        max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
        repetition_penalty min_new_tokens n beam_width json_schema regex ebnf structural_tag ignore_eos
        skip_special_tokens spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed
        custom_params watermark""",
    ("SGLang", "message"): "role content tool_call_id name phase reasoning_content tool_calls tools prefix",
    ("SGLang", "tokenize"): """
        model prompt messages tools tool_choice reasoning_effort continue_final_message chat_template_kwargs
        add_special_tokens add_generation_prompt""",
    ("SGLang", "detokenize"): "model tokens skip_special_tokens",
    ("SGLang", "abort"): "rid abort_all finished_reason abort_message",
    ("llama.cpp", "generate"): """
        verbose timings_per_token stream stream_options cache_prompt return_tokens return_progress sse_ping_interval
        n_predict max_completion_tokens max_tokens n_indent n_keep n_discard n_cmpl n n_cache_reuse t_max_predict_ms
        response_fields top_k top_p min_p top_n_sigma xtc_probability xtc_threshold typical_p temperature
        dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty frequency_penalty presence_penalty dry_multiplier
        dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau mirostat_eta
        adaptive_target adaptive_decay seed n_probs logprobs min_keep backend_sampling post_sampling_probs lora
        json_schema grammar grammar_lazy reasoning_format parse_tool_calls continue_final_message echo preserved_tokens
        grammar_triggers reasoning_control reasoning_budget_tokens reasoning_budget_start_tag reasoning_budget_end_tag
        reasoning_budget_end_tags reasoning_budget_message logit_bias ignore_eos stop samplers prompt id_slot
        image_data penalize_nl tfs_z""",
    ("llama.cpp", "tokenize"): "content add_special parse_special with_pieces",
    ("Ollama, chat and generate", "generate"): """
        model messages tools stream format options keep_alive think logprobs top_logprobs prompt suffix system template
        context raw images width height steps""",
    ("Ollama", "message"): "role content thinking images tool_name tool_calls",
    ("Anthropic, messages", "generate"): """
        model messages max_tokens metadata stop_sequences stream system temperature thinking tool_choice tools top_k
        top_p output_config betas""",
}
