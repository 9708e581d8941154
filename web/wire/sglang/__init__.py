"""The protocols of SGLang and Mini-SGLang: what /generate and /abort_request take and send."""
