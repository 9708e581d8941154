"""Every field that a request to vLLM, SGLang, llama.cpp, Ollama or OpenAI can have, and what becomes of it here.

A field that an endpoint declares is honoured. Any other field that would change the answer is refused, unless its value
changes nothing. The rest is accepted: labels are kept in the history, and notes are listed in a response header. Knows
no endpoint, and no value but the neutral ones. docs/http-api.md is printed from this table.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

Neutrals = tuple[Any, ...]
"""The values of a field that change nothing; `null` is always one."""
Kind = Literal["effect", "label", "note"]
Place = Literal["generate", "tokenize", "detokenize", "message", "stream_options", "structured_outputs", "abort"]
"""Which objects have the field: bodies that generate and `sampling_params`; bodies of /tokenize, of /detokenize and of
/abort_request; a chat message; `stream_options`; `structured_outputs`."""


@dataclass(frozen=True, slots=True)
class Field:
    """One name."""

    name: str
    neutral: Neutrals = ()
    instead: str = ""
    """What to use in place of it."""
    kind: Kind = "effect"
    """`effect`: it changes the answer. `label`: it is only kept. `note`: no value of it changes anything here."""


MOST_SHOWN: Final = 32
"""Most unknown fields that a response header names, and most characters of each."""


def _of(names: str, *neutral: Any, instead: str = "", kind: Kind = "effect") -> tuple[Field, ...]:
    """Return a row for each of *names*."""
    return tuple(Field(name, neutral, instead, kind) for name in names.split())


_TEMPLATE: Final = "variables in `chat_template_kwargs`"
_CHATS: Final = "/v1/chat/completions"
_SYSTEM: Final = "a message of role `system`"

GENERATE: Final = (
    # what is asked, of which model, and how it is sent
    *_of("model messages prompt stream stream_options"),
    *_of("text input_ids", instead="`prompt`"),
    *_of("sampling_params", instead="its members as fields of the body"),
    *_of("chat_template_kwargs", {}),
    *_of("input", instead="`messages` or `prompt`"),
    *_of("instructions system", "", instead=_SYSTEM),
    *_of("suffix template", ""),
    *_of("raw", False, instead="/v1/completions, which has no chat template"),
    *_of("context images documents logits_processors", []),
    *_of("chat_template conversation previous_response_id prompt_embeds input_embeds positional_embed_overrides"),
    *_of("add_generation_prompt", True),
    *_of("continue_final_message add_special_tokens", False),
    *_of("include", []),
    *_of("stream_interval", 1),
    # how long the answer is
    *_of("max_tokens", instead="`max_new_tokens` in `sampling_params`"),
    *_of("max_completion_tokens max_new_tokens max_output_tokens num_predict", instead="`max_tokens`"),
    *_of("n_predict", -1, instead="`max_tokens`"),
    *_of("min_tokens", 0, instead="`min_new_tokens` in `sampling_params`"),
    *_of("min_new_tokens", 0, instead="`min_tokens`"),
    *_of("t_max_predict_ms", -1, 0),
    *_of("n_indent", 0),
    # where it ends
    *_of("stop", "", []),
    *_of("stop_sequences", [], instead="`stop`"),
    *_of("stop_token_ids bad_words", []),
    *_of("stop_regex", "", []),
    *_of("ignore_eos", False),
    *_of("include_stop_str_in_output", False, instead="`no_stop_trim` in `sampling_params`"),
    *_of("no_stop_trim", False, instead="`include_stop_str_in_output`"),
    *_of("repetition_detection"),
    # how a token is chosen
    *_of("n", 1),
    *_of("n_cmpl num_return_sequences", 1, instead="`n`"),
    *_of("best_of beam_width", 1),
    *_of("use_beam_search early_stopping", False),
    *_of("length_penalty", kind="note"),
    *_of("temperature allowed_token_ids"),
    *_of("seed", instead="`sampling_seed` in `sampling_params`"),
    *_of("sampling_seed", instead="`seed`"),
    *_of("top_p typical_p", 1),
    *_of("top_k", -1, 0),
    *_of("min_p min_keep", 0),
    *_of("tfs_z tfs", 1),
    *_of("top_n_sigma", -1, 0),
    *_of("presence_penalty frequency_penalty", 0),
    *_of("repetition_penalty", 1),
    *_of("repeat_penalty", 1, instead="`repetition_penalty`"),
    *_of("repeat_last_n", -1, instead="`repetition_penalty`, which counts all tokens"),
    *_of("penalize_newline penalize_nl", True),
    *_of("logit_bias custom_params", {}),
    *_of("xtc_probability dry_multiplier mirostat dynatemp_range", 0),
    *_of("xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers", kind="note"),
    *_of("mirostat_tau mirostat_eta dynatemp_exponent adaptive_decay", kind="note"),
    *_of("adaptive_target", -1),
    *_of("samplers custom_logit_processor vllm_xargs"),
    *_of("watermark watermarking backend_sampling", False),
    # what it may say
    *_of("response_format", {"type": "text"}),
    *_of("format", "", instead="`response_format`"),
    *_of("grammar", ""),
    *_of("grammar_triggers preserved_tokens", []),
    *_of("grammar_lazy", False),
    *_of("guided_choice guided_grammar guided_json guided_regex"),
    *_of("json_schema regex ebnf structural_tag structured_outputs guided_whitespace_pattern"),
    *_of("guided_decoding_backend", kind="note"),
    *_of("modalities", ["text"]),
    *_of("audio moderation web_search_options task width height steps"),
    *_of("prediction", instead=_CHATS),
    # tools
    *_of("tools", [], instead=_CHATS),
    *_of("functions", [], instead="`tools`"),
    *_of("tool_choice", "none", instead=_CHATS),
    *_of("function_call", "none", instead="`tool_choice`"),
    *_of("parallel_tool_calls", True, False),  # without tools it changes nothing
    *_of("parse_tool_calls", True),
    *_of("max_tool_calls", kind="note"),
    # reasoning
    *_of("verbosity", kind="note"),
    *_of("reasoning_effort", instead=_CHATS),
    *_of("enable_thinking think thinking", instead=_TEMPLATE),
    *_of("reasoning", {}, instead="`reasoning_effort`"),
    *_of("thinking_token_budget thinking_budget reasoning_budget reasoning_budget_tokens", -1, instead=_CHATS),
    *_of("max_thinking_tokens", instead="`thinking_token_budget`"),
    *_of("reasoning_budget_message", ""),
    *_of("reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_end_tags", kind="note"),
    *_of("include_reasoning", True),
    *_of("separate_reasoning", False, True),  # without a template there is no reasoning that could be apart
    *_of("require_reasoning reasoning_control thinking_forced_open", False),
    *_of("reasoning_format", "none", "auto"),
    *_of("stream_reasoning", True),
    # how the prompt is read
    *_of("truncate_prompt_tokens truncation_side"),
    *_of("truncate", False, instead="`truncate_prompt_tokens`"),
    *_of("truncation", "disabled", instead="`truncate_prompt_tokens`"),
    *_of("num_ctx", instead="`--max-seq-len` of the server"),
    *_of("n_keep n_discard", kind="note"),
    *_of("context_management betas", []),
    *_of("options output_config", {}, instead="its members as fields of the body"),
    # what is told of the answer
    *_of("echo return_token_ids return_text_in_logprobs", False),
    *_of("logprobs", False, instead="`return_logprob`"),
    *_of("return_logprob", False, instead="`logprobs`"),
    *_of("top_logprobs", 0, instead="`logprobs`, or in /generate `top_logprobs_num`"),
    *_of("prompt_logprobs", instead="`logprob_start_len`"),
    *_of("logprob_token_ids", []),
    *_of("return_tokens_as_token_ids", False),
    *_of("n_probs", 0, instead="`logprobs`"),
    *_of("post_sampling_probs", False),
    *_of("top_logprobs_num", 0, instead="`top_logprobs`"),
    *_of("logprob_start_len", -1, instead="`prompt_logprobs`"),
    *_of("token_ids_logprob", [], instead="`logprob_token_ids`"),
    *_of("sampling_logprobs_mode"),
    *_of("skip_special_tokens spaces_between_special_tokens", True),
    *_of("return_tokens return_prompt_token_ids", False, instead="`return_token_ids`"),
    *_of("return_input_ids_in_sglext return_output_ids_in_sglext", False, instead="`return_token_ids`"),
    *_of("return_prompt_text", False, instead="`return_token_ids`, and /detokenize"),
    *_of("return_full_text", False, instead="`echo` of /v1/completions"),
    *_of("return_hidden_states return_meta_info return_routed_experts return_indexer_topk return_sampling_mask", False),
    *_of("return_cached_tokens_details", False, instead="`cached_tokens` in `meta_info`"),
    *_of("return_spec_tokens_details return_bytes return_entropy", False),
    *_of("return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs", False),
    *_of("return_flat_raw_top_logprobs_b64 return_token_offsets return_mm_kwargs", kind="note"),
    *_of("routed_experts_start_len routed_experts_prompt_start", 0),
    *_of("timings_per_token return_progress verbose", False),
    *_of("response_fields", []),
    # other models, adapters, caches and engines
    *_of("lora_path extra_key", ""),
    *_of("lora", []),
    *_of("lora_id cache_salt kv_transfer_params ec_transfer_params"),
    *_of("bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size"),
    *_of("session_params", {}),
    *_of("token_indices_to_pool multi_item_delimiter_indices"),
    *_of("background no_logs", False),
    *_of("priority", 0),
    *_of("rid", instead="the id in the header x-minisgl-uid, which the server chooses"),
    *_of("cache_prompt n_cache_reuse id_slot slot_id keep_alive", kind="note"),
    *_of("prompt_cache_retention prompt_cache_options background_options", kind="note"),
    *_of("request_id session_id conversation_id routing_key kv_hints custom_labels log_metrics", kind="note"),
    *_of("data_parallel_rank routed_dp_rank disagg_prefill_dp_rank sse_ping_interval", kind="note"),
    *_of("external_trace_header received_time", kind="note"),
    # images, videos and sounds
    *_of("image_data video_data audio_data encoder_urls", []),
    *_of("mm_hashes mm_content_hashes num_items_assigned", []),
    *_of("mm_processor_kwargs media_io_kwargs images_config video_config", {}),
    *_of("use_audio_in_video need_wait_for_mm_inputs", False),
    *_of("max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch", kind="note"),
    # labels
    *_of("user metadata store service_tier safety_identifier prompt_cache_key", kind="label"),
)
TOKENIZE: Final = (
    *_of("model prompt messages tools chat_template_kwargs"),
    *_of("add_special_tokens add_generation_prompt continue_final_message return_token_strs"),
    *_of("content", instead="`prompt`"),
    *_of("add_special", instead="`add_special_tokens`"),
    *_of("with_pieces", False, instead="`return_token_strs`"),
    *_of("parse_special", True),
    *_of("chat_template truncate_prompt_tokens truncation_side"),
    *_of("enable_thinking reasoning_effort"),
    *_of("documents", []),
    *_of("media_io_kwargs mm_processor_kwargs", {}),
    *_of("tool_choice", kind="note"),
)
DETOKENIZE: Final = _of("model tokens skip_special_tokens")
MESSAGE: Final = (
    *_of("role content name tool_calls tool_call_id reasoning_content reasoning"),
    *_of("annotations images tools", []),
    *_of("audio function_call"),
    *_of("tool_name", "", instead="`name`"),
    *_of("partial prefix", False, instead="`continue_final_message`"),
    *_of("refusal", "", instead="`content`"),
    *_of("thinking thinking_blocks phase", kind="note"),
)
STREAM_OPTIONS: Final = (
    *_of("include_usage continuous_usage_stats"),
    *_of("include_obfuscation", False),
)
STRUCTURED_OUTPUTS: Final = (
    *_of("json regex choice grammar json_object whitespace_pattern structural_tag"),
    *_of("disable_any_whitespace disable_additional_properties", False),
    *_of("disable_fallback", kind="note"),
)
ABORT: Final = (
    *_of("rid abort_all"),
    *_of("abort_message finished_reason"),
)
TABLE: Final[Mapping[Place, tuple[Field, ...]]] = {
    "generate": GENERATE,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
    "message": MESSAGE,
    "stream_options": STREAM_OPTIONS,
    "structured_outputs": STRUCTURED_OUTPUTS,
    "abort": ABORT,
}
LABELS: Final = tuple(one.name for one in GENERATE if one.kind == "label")


def refused(place: Place, declared: Collection[str], instead: Mapping[str, str] | None = None) -> Mapping[str, Field]:
    """Return the fields of *place* that change the answer and that a body with the fields *declared* does not have.

    *instead*: what such a body has in place of them, where it is not what the table says.
    """
    found = {one.name: one for one in TABLE[place] if one.kind == "effect" and one.name not in declared}
    if instead is None:
        return found
    return {name: replace(one, instead=instead.get(name, "")) for name, one in found.items()}


def first_of(names: Collection[str]) -> tuple[str, ...]:
    """Return the first of *names* that a header shows, in order. To sort tens of thousands takes too long."""
    return tuple(heapq.nsmallest(MOST_SHOWN, names))
