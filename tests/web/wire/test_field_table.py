"""The table of all fields: what is refused, what passes, what is listed. What honoured fields do is in
tests/support/fields.py and, for SGLang's form, in test_sglang_schemas.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from support.wire import refusal

from web.wire.constraints import StructuredOutputs
from web.wire.fields import TABLE, Field, Place
from web.wire.openai.messages import Message
from web.wire.openai.schemas import ChatRequest, CompletionRequest, StreamOptions, parse_chat, parse_completion
from web.wire.openai.tokenizer import DetokenizeRequest, TokenizeRequest, parse_detokenize, parse_tokenize
from web.wire.sglang.schemas import (
    AbortRequest,
    SGLangRequest,
    SGLangSampling,
    TextRequest,
    parse_abort,
    parse_generate,
)

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
"""The fields of other projects' request models in November 2026. To follow a project, add its new names."""


ODD = {"odd": ["value"]}
HELLO = {"role": "user", "content": "hello"}


@dataclass(frozen=True, slots=True)
class Form:
    """An object of some request that has the fields of a place."""

    place: Place
    declared: Collection[str]
    parse: Callable[[bytes], Any]
    body: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Returns a body that has these fields there."""
    param: str = ""
    """Before the field's name in an error."""
    listed: str = ""
    """Before the field's name in the header."""
    elsewhere: Collection[str] = ()
    """Names that belong in another object of the same body, whatever their value."""


FORMS = {
    "chat": Form("generate", ChatRequest.model_fields, parse_chat, lambda more: {"messages": [HELLO], **more}),
    "completions": Form(
        "generate", CompletionRequest.model_fields, parse_completion, lambda more: {"prompt": "a", **more}
    ),
    "SGLang's form": Form(
        "generate", SGLangRequest.model_fields, parse_generate, lambda more: {"text": "a", **more},
        elsewhere=SGLangSampling.model_fields,
    ),
    "sampling_params": Form(
        "generate", SGLangSampling.model_fields, parse_generate, lambda more: {"text": "a", "sampling_params": more},
        "sampling_params.", "sampling_params.", SGLangRequest.model_fields,
    ),
    "Mini-SGLang's form": Form(
        "generate", TextRequest.model_fields, parse_generate, lambda more: {"prompt": "a", **more},
        elsewhere=("text", "input_ids"),
    ),
    "tokenize": Form(
        "tokenize", TokenizeRequest.model_fields, parse_tokenize, lambda more: {"messages": [HELLO], **more}
    ),
    "detokenize": Form(
        "detokenize", DetokenizeRequest.model_fields, parse_detokenize, lambda more: {"tokens": [1], **more}
    ),
    "message": Form(
        "message", Message.model_fields, parse_chat, lambda more: {"messages": [{**HELLO, **more}]},
        "messages.0.", "messages.",
    ),
    "stream_options": Form(
        "stream_options", StreamOptions.model_fields, parse_chat,
        lambda more: {"messages": [HELLO], "stream": True, "stream_options": more},
        "stream_options.", "stream_options.",
    ),
    "structured_outputs": Form(
        "structured_outputs", [info.alias or name for name, info in StructuredOutputs.model_fields.items()],
        parse_chat, lambda more: {"messages": [HELLO], "structured_outputs": {"regex": "a", **more}},
        "structured_outputs.", "structured_outputs.",
    ),
    "abort": Form("abort", AbortRequest.model_fields, parse_abort, lambda more: {"rid": "a", **more}),
}  # fmt: skip
NEEDED = {"message": HELLO, "structured_outputs": ("regex",)}
ROWS = [(place, row) for place, rows in TABLE.items() for row in rows]


@pytest.mark.parametrize(("place", "row"), ROWS, ids=[f"{place}-{row.name}" for place, row in ROWS])
def test_a_field_is_honoured_or_refused_by_its_name_or_listed(place: Place, row: Field) -> None:
    forms = [form for form in FORMS.values() if form.place == place]
    for form in forms:
        if row.name in form.declared:
            continue
        if row.kind != "effect":
            assert _unknown(form, row.name, ODD) == (form.listed + row.name,)
            continue
        error = refusal(form.parse, form.body({row.name: ODD}))
        assert (error.status, error.param) == (400, form.param + row.name)
        assert row.name in error.message and "odd" not in error.message
        for neutral in (None, *(row.neutral if row.name not in form.elsewhere else ())):
            assert _unknown(form, row.name, neutral) == ()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_field_that_an_endpoint_has_is_in_the_table(form: Form) -> None:
    assert set(form.declared) <= {row.name for row in TABLE[form.place]}


@pytest.mark.parametrize("name", FORMS)
def test_every_optional_field_takes_null_as_absent(name: str) -> None:
    form, plain = FORMS[name], FORMS[name].body({})
    nulls = dict.fromkeys({*form.declared} - {*plain, *NEEDED.get(name, ())})
    assert form.parse(json.dumps(form.body(nulls)).encode()) == form.parse(json.dumps(plain).encode())


@pytest.mark.parametrize("place", TABLE)
def test_no_field_is_in_the_table_twice(place: Place) -> None:
    names = [row.name for row in TABLE[place]]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("project", "place"), NAMES, ids=lambda value: value)
def test_every_field_of_other_projects_is_in_the_table(project: str, place: Place) -> None:
    assert set(NAMES[project, place].split()) <= {row.name for row in TABLE[place]}


def test_an_error_says_what_to_use_instead() -> None:
    for form, asked, expected in (
        ("chat", {"stop_sequences": ["a"]}, "leave it out or send [], or use `stop`"),
        ("chat", {"max_output_tokens": 5}, "leave it out, or use `max_tokens`"),
        ("chat", {"think": False}, "leave it out, or use variables in `chat_template_kwargs`"),
        ("sampling_params", {"max_tokens": 5}, "leave it out, or use `max_new_tokens` in `sampling_params`"),
        ("sampling_params", {"return_logprob": True}, "belongs beside `sampling_params`"),
        ("chat", {"functions": [{"name": "f"}]}, "leave it out or send [], or use `tools`"),
        ("completions", {"tools": [{"type": "function"}]}, "or send [], or use /v1/chat/completions"),
        ("completions", {"thinking_budget": 0}, "or send -1, or use /v1/chat/completions"),
        ("tokenize", {"content": "a"}, "leave it out, or use `prompt`"),
        ("chat", {"best_of": 4}, "send 1"),
        ("chat", {"format": "json"}, "`response_format`"),
        ("SGLang's form", {"rid": "x"}, "`meta_info.id`"),
        ("SGLang's form", {"rid": "x"}, "x-minisgl-uid"),
        ("SGLang's form", {"top_p": 0.5}, "`sampling_params`"),
        ("SGLang's form", {"top_logprobs_num": 2}, "`return_logprob: true`"),
        ("Mini-SGLang's form", {"top_p": 0.5}, "`text` and `sampling_params`"),
    ):
        assert expected in refusal(FORMS[form].parse, FORMS[form].body(asked)).message


SENT_BY_DEFAULT: Mapping[str, Mapping[str, Any]] = {
    "a message of OpenAI's, sent back": {
        "messages": [
            HELLO,
            {
                "role": "assistant", "content": "Hi.", "refusal": None, "annotations": [], "audio": None,
                "function_call": None, "tool_calls": None,
            },
            HELLO,
        ]
    },
    "all samplers of llama.cpp, off": {
        "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "typical_p": 1.0, "top_n_sigma": -1,
        "xtc_probability": 0, "xtc_threshold": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2,
        "dry_penalty_last_n": -1, "dynatemp_range": 0, "dynatemp_exponent": 1, "repeat_penalty": 1.0,
        "cache_prompt": True, "id_slot": -1, "n_predict": -1, "n_keep": 0, "grammar": "", "timings_per_token": False,
    },
    "a reasoning client": {
        "reasoning_effort": "low",
        "verbosity": "high",
        "messages": [
            HELLO,
            {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm.", "thinking_blocks": [{"thinking": ""}]},
            HELLO,
        ],
    },
    "OpenAI's defaults": {
        "n": 1, "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {},
        "logprobs": False, "stop": None, "response_format": {"type": "text"}, "modalities": ["text"], "tools": [],
        "parallel_tool_calls": True, "store": False, "service_tier": "auto", "stream": False, "tool_choice": None,
        "prompt_cache_retention": "24h", "functions": [], "seed": None, "user": "", "metadata": {},
    },
}  # fmt: skip


@pytest.mark.parametrize("asked", SENT_BY_DEFAULT.values(), ids=SENT_BY_DEFAULT)
def test_what_clients_send_by_default_passes(asked: Mapping[str, Any]) -> None:
    parse_chat(json.dumps({"messages": [HELLO], **asked}).encode())


def test_advice_is_listed() -> None:
    asked = SENT_BY_DEFAULT["a reasoning client"]
    listed = ("messages.thinking_blocks", "verbosity")
    assert parse_chat(json.dumps(asked).encode()).unknown == listed


def _unknown(form: Form, name: str, value: Any) -> tuple[str, ...]:
    """Return the names that are listed in the header."""
    unknown: tuple[str, ...] = form.parse(json.dumps(form.body({name: value})).encode()).unknown
    return unknown
