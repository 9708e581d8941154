"""Ways to break a promise of the log: patches to commits and to who calls them, and the tests that must notice each.

A patch is text that must occur exactly once, so that a change of the code shows at once that its mutation is gone.
At night every test that a mutation names must fail; the cheapest comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

COMMITS: Final = "pipeline/log/commits"
CONTRACT: Final = "tests/pipeline/log/contract"
REDIS: Final = "tests/pipeline/log/test_redis_log.py::"
QUOTAS: Final = "tests/pipeline/log/test_redis_log_quotas.py::"
STORED: Final = "tests/pipeline/log/test_stored.py::"
SIBLINGS: Final = "tests/pipeline/log/test_redis_log_siblings.py::"
FORGETTING: Final = "tests/pipeline/log/test_redis_log_forgetting.py::"
TURNS: Final = "tests/pipeline/log/test_turns.py::"
PREFERRED: Final = "tests/pipeline/log/test_preferred.py::"
TAKEOVER: Final = "tests/stages/generate/loop/test_takeover.py::"
AHEAD: Final = "tests/stages/generate/schedule/test_ahead.py::"
OVERLAP: Final = "tests/stages/generate/loop/test_overlap.py::"
STORIES: Final = f"{OVERLAP}test_a_request_gets_the_same_with_overlap_and_without"
"""Random stories of an engine's loop."""
MACHINE: Final = (
    "tests/pipeline/log/test_commit_machine.py"
    "::test_whatever_workers_do_every_request_ends_once_and_as_the_model_says[{server}]"
)
"""Random stories beside a model, with a fixed seed here."""
READ_BEFORE: Final = (
    "tests/pipeline/stage/test_worker.py"
    "::test_what_the_slot_had_read_before_comes_one_by_one_and_before_what_is_new_where_the_order_matters[memory-True]"
)
ZOMBIE: Final = (
    "tests/pipeline/log/test_commit_machine.py"
    "::test_a_zombie_that_writes_between_the_fold_and_the_next_step_breaks_no_chain[{server}]"
)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change that must not go unnoticed."""

    name: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    """Each of these tests must fail; `{server}` stands for the Redis of the run."""


def contract(file: str, test: str, case: str = "") -> str:
    return f"{CONTRACT}/test_{file}.py::{test}[{{server}}{case}]"


def lua(commit: str, name: str, old: str, new: str, *tests: str) -> Mutation:
    """Return a mutation of a commit, which random stories find, too."""
    return Mutation(name, f"{COMMITS}/{commit}.lua", old, new, (*tests, MACHINE))


FENCE: Final = "if fenced(key.owner, arg.owner) then return 'FENCED' end\n"
"""How the commits begin that only an owner may do .."""
FENCE_BY_PLACE: Final = "if fenced(KEYS[1], ARGV[1]) then return 'FENCED' end\n"
""".. and those that have their arguments by place."""

MUTATIONS: Final = (
    # the fence
    lua("step", "a step of who lost its slot is appended", FENCE_BY_PLACE, "",
        contract("step", "test_a_step_is_fenced"), ZOMBIE),
    lua("produced", "a detokenizer that lost its slot writes to histories", FENCE_BY_PLACE, "",
        contract("produced", "test_produced_is_fenced")),
    lua("take", "an engine that lost its slot takes requests", FENCE, "",
        contract("take", "test_take_is_fenced_and_leaves_the_entries_to_the_next_owner")),
    lua("take", "an engine reads before it is known whether it may",
        """if fenced(key.owner, arg.owner) then return 'FENCED' end
""",
        """if tonumber(arg.max_entries) > 0 then
  redis.call('XREADGROUP', 'GROUP', 'generate', arg.slot, 'COUNT', arg.max_entries, 'STREAMS', key.tokenized, '>')
end
if fenced(key.owner, arg.owner) then return 'FENCED' end
""",
        contract("take", "test_take_is_fenced_and_leaves_the_entries_to_the_next_owner")),
    Mutation("an owner is not charged for what it was given", f"{COMMITS}/take.lua",
        "one.given = one.given + ", "one.given = one.given + 0 * ",
        (f"{TURNS}test_owners_get_tokens_by_their_weights[{{server}}-sizes0]",)),
    Mutation("who comes late saved up its turns", f"{COMMITS}/lib.lua",
        "if is_new then given = math.max(given, told[2] or 0) end", "",
        (f"{TURNS}test_a_newcomer_gets_no_more_than_its_share[{{server}}]",
         f"{TURNS}test_an_owner_saves_no_turns_while_its_least_urgent_request_waits[{{server}}]")),
    Mutation("the clock stands still while others come", f"{COMMITS}/take.lua",
        "math.max(clock, one.given) + math.floor(1000 * tokens / weights)", "math.max(clock, one.given)",
        (f"{TURNS}test_owners_that_come_again_and_again_starve_none_that_waits[{{server}}]",)),
    Mutation("what another engine has is taken", f"{COMMITS}/take.lua",
        "local entry = item and redis", "local entry = redis",
        (f"{TURNS}test_what_an_engine_of_an_older_version_took_is_not_taken_again[{{server}}]",)),
    Mutation("another owner does not end the line", f"{COMMITS}/tokenized.lua",
        "if only ~= '' and only ~= arg.line then", "if not only then",
        (f"{TURNS}test_a_single_request_is_taken_next_however_many_of_another_owner_wait[{{server}}]",)),
    Mutation("what prefers an engine is any engine's", f"{COMMITS}/take.lua",
        "return is_free[engine] or waited", "return true or waited",
        (f"{PREFERRED}test_an_engine_takes_what_prefers_it_first_and_leaves_the_others_theirs[{{server}}]",)),
    Mutation("what prefers an engine waits until that has room", f"{COMMITS}/take.lua",
        " or redis.call('SISMEMBER', key.full, engine) == 1", "",
        (f"{PREFERRED}test_another_engine_takes_what_an_engine_without_room_leaves_until_it_has_some[{{server}}]",)),
    Mutation("what prefers an engine waits for ever", f"{COMMITS}/take.lua",
        " or waited >= tonumber(arg.steal_ms), false, waited", ", false, waited",
        (f"{PREFERRED}test_another_engine_takes_what_was_left_for_too_long[{{server}}]",)),
    lua("claim", "who lost its slot claims", FENCE, "", contract("groups", "test_claim_is_fenced"),
        contract("groups", "test_who_lost_the_own_slot_claims_nothing_as_a_guest")),
    Mutation("a guest that lost the slot claims what its worker has in hand", f"{COMMITS}/claim.lua",
        """elseif fenced(key.other_owner, arg.guest) then
  return {}
""",
        "", (contract("groups", "test_nothing_is_claimed_from_a_slot_once_its_guest_has_lost_it"),)),
    lua("claim", "a claim takes from the living",
        "  if redis.call('EXISTS', key.other_lease) == 1 then return {} end\n", "",
        contract("groups", "test_claim_takes_from_slots_without_a_lease_only")),
    # acknowledged once, where the work is committed
    Mutation("an entry counts that nobody has read", f"{COMMITS}/tokenized.lua",
        "if redis.call('XACK', key.submitted, 'tokenize', arg.entry) == 0 then return 'LOST' end\n",
        "redis.call('XACK', key.submitted, 'tokenize', arg.entry)\n",
        (contract("tokenized", "test_tokenized_of_an_entry_that_nobody_read_is_lost_and_the_entry_stays"),)),
    lua("tokenized", "a tokenized request is acknowledged outside of the script, or never",
        """if redis.call('XACK', key.submitted, 'tokenize', arg.entry) == 0 then return 'LOST' end
redis.call('XDEL', key.submitted, arg.entry)
""",
        "", contract("tokenized", "test_tokenized_consumes_its_entry")),
    lua("produced", "a step is said again to the clients when it is committed again",
        "if redis.call('XACK', KEYS[2], 'detokenize', unpack(ids)) == 0 then return 'LOST' end\n",
        "redis.call('XACK', KEYS[2], 'detokenize', unpack(ids))\n",
        contract("produced", "test_a_repeated_produced_is_lost_and_changes_nothing")),
    Mutation("a part of a step is said again after a lost reply", f"{COMMITS}/produced.lua",
        "or item[4] >= tries then", "then",
        (contract("produced", "test_a_part_of_a_step_is_written_once_and_counts_its_tries"),)),
    Mutation("a part of a step does not count its tries", f"{COMMITS}/produced.lua",
        ", 'RETRYCOUNT', tries, 'JUSTID')", ", 'JUSTID')",
        (contract("produced", "test_a_part_of_a_step_is_written_once_and_counts_its_tries"),)),
    Mutation("of several steps those are consumed that are still there", f"{COMMITS}/produced.lua",
        "    if not are_pending[id] then return 'LOST' end\n", "",
        (contract("produced", "test_several_steps_are_consumed_together_or_not_at_all"),)),  # stories seldom find it
    Mutation("tokens do not say when the engine made them", f"{COMMITS}/produced.lua",
        "  if made == '0' then return {} end\n", "  if made then return {} end\n",
        (contract("produced", "test_tokens_say_how_long_before_their_commit_the_engine_had_made_them"),)),
    lua("step", "a request that ended stays in `tokenized`", "  redis.call('XDEL', KEYS[4], ARGV[i])\n", "",
        contract("step", "test_a_step_deletes_the_entries_that_ended")),
    Mutation("a journal grows without end", f"{COMMITS}/produced.lua", "    redis.call('XDEL', key, first[1])\n",
        "    return\n",
        (contract("journal", "test_the_oldest_steps_leave_a_journal_that_is_full"),)),
    Mutation("a journal is kept where memory is short", f"{COMMITS}/produced.lua",
        "      if is_full then redis.call('DEL', key) end\n", "",
        (contract("journal", "test_where_memory_is_short_the_journal_goes_and_the_step_is_committed"),)),
    # explicit ids
    lua("step", "steps have the ids of a clock", "redis.pcall('XADD', KEYS[3], ARGV[at], 'ms'",
        "redis.pcall('XADD', KEYS[3], '*', 'ms'",
        contract("step", "test_a_step_reads_as_it_was_said_under_epoch_and_number")),
    lua("step", "a step that is there already is appended again", "if refused and last_id() ~= last then\n",
        "if refused then redis.call('XADD', KEYS[3], '*', 'ms', now_ms(), 'kind', 'step') end\nif false then\n",
        contract("step", "test_a_retried_step_leaves_one_entry_and_answers_the_same")),
    lua("step", "of several steps only the first is appended", "    if not refused then\n", "    if not last then\n",
        contract("step", "test_several_steps_are_one_commit")),
    lua("step", "a step that is there already is an error",
        "if refused and not is_of_ids then return refused end\n", "if refused then return refused end\n"),
    lua("produced", "tokens have the ids of a clock in a history", "'NOMKSTREAM', args[token], 'ms'",
        "'NOMKSTREAM', '*', 'ms'",
        contract("produced", "test_produced_writes_histories_and_consumes_the_step")),
    lua("produced", "a row that is refused loses those after it", "try('XADD', keys[history]",
        "redis.call('XADD', keys[history]"),
    lua("lib", "a history that is gone begins anew", "'XADD', history, 'NOMKSTREAM', id", "'XADD', history, id",
        contract("end", "test_end_of_an_unknown_request_makes_no_history")),
    # the end, once
    lua("lib", "a second end is said, too", "if not append(key.history, SEAL, fields, now) then return false end\n",
        "append(key.history, SEAL, fields, now)\n", contract("end", "test_the_first_seal_wins"),
        contract("end", "test_end_tells_frontend_and_engines_and_clears_live")),
    lua("lib", "who ended lives on", "redis.call('ZREM', key.live, uid)\n", "",
        contract("end", "test_end_tells_frontend_and_engines_and_clears_live")),
    lua("lib", "engines are not told who ended",
        "redis.call('XADD', key.control, 'MAXLEN', '~', 1000, '*', 'uid', uid)\n", "",
        contract("end", "test_end_tells_frontend_and_engines_and_clears_live")),
    # entries that cannot be read
    Mutation("what nobody has read is buried", f"{COMMITS}/bury.lua",
        "if redis.call('XACK', key.stream, arg.group, arg.entry) == 0 then return 'LOST' end\n",
        "redis.call('XACK', key.stream, arg.group, arg.entry)\n",
        (contract("bury", "test_what_nobody_has_read_is_not_buried", "-submitted"),)),
    Mutation("the request of an entry that is buried lives on", f"{COMMITS}/bury.lua",
        "ipairs(arg.uids) do\n", "ipairs({}) do\n",
        (contract("bury", "test_a_burial_ends_its_request_in_the_same_commit", "-submitted"),)),
    Mutation("steps are lost behind an id that no engine wrote", f"{COMMITS}/step.lua",
        "if refused and last_id() ~= last then\n", "if false then\n",
        (contract("bury", "test_a_step_waits_for_an_entry_beyond_it_and_loses_nothing", "-1-9"),)),
    # archivers
    Mutation("a namespace without an archiver keeps what nobody reads", f"{COMMITS}/lib.lua",
        "redis.pcall('XADD', ended, 'NOMKSTREAM', '*'", "redis.pcall('XADD', ended, '*'",
        (contract("archivers", "test_without_archivers_nothing_is_kept_for_them"),)),
    Mutation("a request that a step ends is not archived", f"{COMMITS}/produced.lua",
        "    tell_archivers(KEYS[5], KEYS[6], uid, ARGV[5], now)\n", "",
        (contract("archivers", "test_whatever_ends_a_request_names_it_once"),)),
    Mutation("a dead archiver fills Redis", f"{COMMITS}/lib.lua",
        "redis.call('XTRIM', ended, 'MINID', oldest)", "0",
        (contract("archivers", "test_what_nobody_has_read_within_the_retention_is_dropped_and_counted"),)),
    Mutation("an archiver that lost its slot consumes entries", f"{COMMITS}/archived.lua", FENCE, "",
        (contract("archivers", "test_who_lost_its_slot_consumes_nothing"),)),
    # ranks
    Mutation("a rank 0 that lost its slot forms a group", f"{COMMITS}/form.lua", FENCE, "",
        (contract("ranks", "test_only_who_holds_a_slot_of_rank_0_forms"),)),
    Mutation("a repeated formation starts the ranks again", f"{COMMITS}/form.lua",
        "if newest and newest[2][2] == arg.nonce then return newest[1] end\n", "",
        (contract("ranks", "test_the_same_formation_again_is_the_same_entry"),)),
    Mutation("a rank that lost its slot says that it has joined", f"{COMMITS}/joined.lua", FENCE, "",
        (contract("ranks", "test_a_rank_that_lost_its_slot_consumes_no_formation"),)),
    # slots
    lua("acquire", "two owners of a slot have one epoch", "'^%d+')) + 1\n", "'^%d+'))\n",
        contract("slots", "test_acquire_gives_rising_epochs_and_refuses_a_held_slot")),
    lua("acquire", "a slot that somebody holds is given away",
        "  if is_guest(arg.nonce) or not is_guest(nonce) then return 0 end\n", "",
        contract("slots", "test_acquire_gives_rising_epochs_and_refuses_a_held_slot")),
    Mutation("two models in one namespace mix", f"{COMMITS}/acquire.lua",
        "if arg.serves and not fits(arg.serves, key.serving) then return -1 end\n", "",
        (contract("serving", "test_a_worker_that_does_not_fit_gets_no_slot", "-other0"),)),
    Mutation("who slept goes on beside another model", f"{COMMITS}/renew.lua",
        "if arg.serves and not fits(arg.serves, key.serving) then return 0 end\n", "",
        (contract("serving", "test_a_lease_that_ran_out_is_not_renewed_once_others_serve_something_else"),)),
    lua("renew", "who lost a slot takes its lease back", "if fenced(key.owner, arg.owner) then return 0 end\n", "",
        contract("slots", "test_renew_after_the_acquire_of_another_is_refused")),
    lua("release", "anybody gives a lease back", "if redis.call('GET', key.lease) ~= arg.owner then return 0 end\n", "",
        contract("slots", "test_release_is_the_owners_alone")),
    # nothing is lost, nothing is left
    lua("prepare", "a group does not read what was appended before it", "arg.group, '0', 'MKSTREAM'",
        "arg.group, '$', 'MKSTREAM'", contract("groups", "test_a_group_created_after_the_first_append_reads_it")),
    lua("submit", "a history is kept for ever", "  redis.call('PEXPIREAT', history, gone)\n", "",
        f"{REDIS}test_every_key_has_a_time_to_live_but_the_lasting_ones[{{server}}]"),
    lua("submit", "a request is submitted twice", "if redis.call('EXISTS', history) == 1 then", "if false then"),
    Mutation("what was submitted before counts as acknowledged", f"{COMMITS}/submit.lua",
        "if left_ms > 0 then redis.call('PEXPIRE', expiring, left_ms) end", "",
        tuple(f"tests/pipeline/log/test_acks.py::test_what_no_replica_has_is_not_acknowledged_though_the_server_has_it"
              f"[embedded-{count}]" for count in (1, 2))),
    # requests that come from elsewhere
    Mutation("an import writes into a history that is there", f"{COMMITS}/import.lua",
        "if redis.call('EXISTS', key.history) == 1 then\n", "if false then\n",
        (contract("past", "test_an_import_leaves_the_history_that_is_there"),)),
    Mutation("an imported history is kept for ever", f"{COMMITS}/import.lua",
        "redis.call('PEXPIRE', key.history, arg.retention_ms)\n", "",
        ("tests/pipeline/log/test_redis_log_past.py::test_an_import_makes_one_key_with_a_time_to_live[{server}]",)),
    # requests that are to be forgotten
    Mutation("who has not ended is erased", f"{COMMITS}/erase.lua",
        "if last[1] and last[1][1] ~= SEAL then return 'LIVES' end\n", "",
        (contract("forgetting", "test_who_has_not_ended_is_not_erased"),)),
    Mutation("archivers do not hear of what is erased", f"{COMMITS}/erase.lua",
        "if arg.tells then", "if false then",
        (contract("forgetting", "test_a_finished_tombstone_says_so_and_tells_no_archiver"),)),
    Mutation("what is purged stays beside its neighbours", f"{COMMITS}/purge.lua",
        "    if not left_out[entry[1]] then redis.call('XADD', key.copy, entry[1], unpack(entry[2])) end\n",
        "    redis.call('XADD', key.copy, entry[1], unpack(entry[2]))\n",
        (contract("forgetting", "test_what_is_purged_is_gone_and_all_else_is_as_it_was"),)),
    Mutation("two who purge a stream undo each other's work", f"{COMMITS}/purge.lua",
        " or marked[2][2] ~= version then\n", " then\n",
        (f"{FORGETTING}test_who_purges_while_another_one_did_begins_again[{{server}}]",)),
    Mutation("what was trimmed while others were purged comes back", f"{COMMITS}/purge.lua",
        "if first then redis.call('XTRIM'", "if false then redis.call('XTRIM'",
        (f"{FORGETTING}test_what_is_trimmed_while_others_are_purged_does_not_come_back[{{server}}-trimmed]",)),
    Mutation("a letter that was dropped while others were purged comes back", f"{COMMITS}/lib.lua",
        "redis.call('HINCRBY', versions, letters, 1)", "redis.call('HINCRBY', versions, letters, 0)",
        (f"{FORGETTING}test_a_letter_that_is_dropped_while_others_are_purged_does_not_come_back[{{server}}]",)),
    Mutation("a dead letter is sent again twice", f"{COMMITS}/submit.lua",
        "#redis.call('XRANGE', key.dead, arg.letter, arg.letter) == 0", "false",
        (contract("end", "test_a_submit_that_sends_a_dead_letter_again_drops_it_and_a_second_one_is_refused"),)),
    Mutation("who erases drops what others have not archived", f"{COMMITS}/erase.lua",
        "'NOMKSTREAM', '*'", "'NOMKSTREAM', 'MAXLEN', '1', '*'",
        (contract("archivers", "test_a_tool_whose_retention_is_shorter_drops_nothing"),)),
    Mutation("an entry after a purge has the id of one that is gone", f"{COMMITS}/purge.lua",
        "redis.pcall('XADD', key.copy, last[1], 'last', '')", "false",
        (contract("forgetting", "test_a_stream_goes_on_after_a_purge_as_if_nothing_had_been_taken_out"),)),
    # how many wait
    Mutation("what ended while it waited counts", f"{COMMITS}/submit.lua",
        "local living = redis.call('ZCARD', key.live)",
        "local living = redis.call('XLEN', key.submitted) + redis.call('XLEN', key.tokenized)",
        (contract("submit", "test_what_ended_while_it_waited_does_not_wait_though_no_worker_has_seen_that"),)),
    Mutation("what an engine has taken counts", f"{COMMITS}/submit.lua",
        "num_taken + tonumber(consumer[2])", "num_taken",
        (contract("submit", "test_what_an_engine_has_taken_does_not_wait"),)),
    Mutation("what ended while an engine had it makes room", f"{COMMITS}/submit.lua",
        "return living - (#taken - #ended_of(taken)) > most", "return living - #taken > most",
        (contract("submit", "test_what_ended_while_an_engine_had_it_makes_no_room_for_more_to_wait"),)),
    Mutation("a refused request is kept as long as any other", f"{COMMITS}/lib.lua",
        "arg.stored_ms, n == '0' and arg.brief_ms)", "arg.stored_ms)",
        (f"{REDIS}test_the_history_of_a_refused_request_has_a_minute_to_live[{{server}}]",)),
    # stored responses
    Mutation("a piece goes though another one needs it", f"{COMMITS}/lib.lua",
        "if before == '' or count_user(piece, -1) > 0 then break end", "if before == '' then break end",
        (f"{STORED}test_what_is_erased_takes_along_what_only_it_had[{{server}}]",)),
    Mutation("a piece does not need the one before it", f"{COMMITS}/lib.lua",
        "      if before ~= NO_PIECE then count_user(prefix .. before, 1) end\n", "",
        (f"{STORED}test_what_is_counted_is_what_is_there[{{server}}]",)),
    Mutation("a stored response goes with the others", f"{COMMITS}/lib.lua",
        "  return redis.call('PTTL', history)\nend", "  return retention_ms\nend",
        (f"{STORED}test_a_stored_response_outlives_others_whoever_ends_it[{{server}}]",)),
    Mutation("what runs is removed, too", f"{COMMITS}/retire.lua",
        "last and last[1] == SEAL and tonumber(last[2][2]) or now", "0",
        (f"{STORED}test_above_the_limit_the_oldest_go_that_have_ended_longer_ago_than_others_are_kept[{{server}}]",)),
    Mutation("any number may run in the background", f"{COMMITS}/submit.lua",
        "tonumber(arg.max_background), 'TOO", "9e9, 'TOO",
        (contract("quota", "test_so_many_of_one_owner_run_in_the_background"),)),
    # siblings
    lua("submit", "what siblings share is kept for ever", "  redis.call('PEXPIREAT', key.shared, gone)\n", "",
        f"{SIBLINGS}test_of_siblings_every_key_has_a_time_to_live[{{server}}]"),
    Mutation("what siblings share expires with the first of them", f"{COMMITS}/lib.lua",
        "if redis.pcall('HINCRBY', shared, 'left', -1) == 0 or", "if redis.call('HINCRBY', shared, 'left', -1) or",
        (f"{SIBLINGS}test_what_siblings_share_goes_sooner_when_all_ended_soon[{{server}}]",)),
    Mutation("what siblings share expires before a history that is kept for longer", f"{COMMITS}/lib.lua",
        "redis.call('PTTL', shared) < tonumber(retention_ms)", "false",
        (f"{SIBLINGS}test_what_siblings_share_expires_with_the_last_of_them[{{server}}]",)),
    Mutation("a dead letter of a sibling lacks what it shared", f"{COMMITS}/end.lua",
        "whole(entry[2], text_of, texts)", "entry[2]",
        (contract("siblings", "test_a_dead_letter_of_a_sibling_holds_the_whole_request_and_can_be_sent_again"),)),
    Mutation("siblings begin in the middle where the first one is gone and the others are not", f"{COMMITS}/submit.lua",
        "ipairs(key.histories) do --", "ipairs({ key.histories[1] }) do --",
        (contract("siblings", "test_a_repeated_submit_of_siblings_of_which_one_is_gone_is_a_duplicate_too", "-0"),)),
    Mutation("siblings are let in where there is room for one", f"{COMMITS}/submit.lua",
        "more_wait_than(tonumber(arg.max_queued) - count)", "more_wait_than(tonumber(arg.max_queued) - 1)",
        (contract("siblings", "test_siblings_are_refused_when_there_is_no_room_for_all"),
        contract("siblings", "test_more_siblings_than_may_wait_at_all_are_always_refused"))),
    lua("submit", "siblings run as one under a quota",
        "  for _, sibling in ipairs(arg.uids) do redis.call('SADD', count[1], sibling) end\n",
        "  redis.call('SADD', count[1], arg.uids[1])\n",
        contract("siblings", "test_siblings_run_each_for_itself_but_are_accepted_where_one_would_be")),
    Mutation("what a key submits is not counted", f"{COMMITS}/submit.lua",
        "parts[#parts][2] + num_bytes", "parts[#parts][2]",
        (contract("quota", "test_a_key_submits_no_more_than_its_share_of_the_log"),)),
    Mutation("a share that is used up never gets free", f"{COMMITS}/submit.lua",
        "    if tonumber(begin) + kept_ms > now then\n", "    if tonumber(begin) > 0 then\n",
        (f"{QUOTAS}test_the_bytes_of_a_key_are_one_value_with_few_parts_and_a_time_to_live[{{server}}]",)),
    lua("submit", "the idempotency key of siblings is held by the first of them",
        "redis.call('SET', key.idempotency, uid .. ':'", "redis.call('SET', key.idempotency, arg.uids[1] .. ':'",
        contract("siblings", "test_siblings_have_one_idempotency_key_under_the_uid_as_which_they_were_submitted")),
    lua("abandon", "who came to siblings can never abandon them", "not (holder == arg.base and left == ':left')",
        "not (holder == arg.uid and left == ':left')",
        contract("abandon", "test_who_came_to_siblings_abandons_them_only_after_the_client_that_sent_them")),
    lua("abandon", "who leaves siblings has not left them", "  if holder == arg.base and left == '' then\n",
        "  if holder == arg.uid and left == '' then\n",
        contract("abandon", "test_who_leaves_one_of_several_siblings_to_its_readers_leaves_them_all")),
    Mutation("a take whose reply was lost is done again", "pipeline/log/operations/engines.py",
        "steal_ms=int(steal_after_s * 1000),\n        once=True,\n", "steal_ms=int(steal_after_s * 1000),\n",
        (f"{REDIS}test_what_brought_entries_and_broke_is_not_repeated_and_they_are_found_by_pending[{{server}}-take]",)),
    Mutation("a worker does not begin with what its slot has read before", "pipeline/stage/worker.py",
        "self._own: list[Entry] | None = None  # None: to be looked up", "self._own: list[Entry] | None = []",
        (READ_BEFORE,)),
    Mutation("an engine goes on with its predecessor's requests before that one's last steps are in the histories",
        "stages/generate/loop/log_thread.py",
        "while entries and self._log.backlog(", "while False and self._log.backlog(",
        ("tests/stages/generate/loop/test_worker.py::test_an_engine_waits_for_the_steps_of_its_predecessor[memory]",)),
    Mutation("an engine takes over from a dead one before that one's last steps are in the histories",
        "stages/generate/loop/log_thread.py",
        "if self._log.backlog(Inbox.steps(self._log.names, slot)):", "if False:",
        (f"{TAKEOVER}test_an_engine_waits_for_the_steps_of_a_dead_one_and_serves_its_own_meanwhile[memory]",)),

    # overlap
    Mutation("a request that came back gets the token in flight of the one that left",
        "stages/generate/schedule/schedule.py",
        "if self._by_uid.get(request.uid) is not request:", "if request.uid not in self._by_uid:",
        (f"{AHEAD}test_a_uid_that_left_and_came_back_does_not_get_the_old_token",)),
    Mutation("pages are given back while a step in flight writes to them", "stages/generate/schedule/schedule.py",
        "for request in [request for request in self._leaving if request.last_plan <= self._num_landed]:",
        "for request in self._leaving[:]:",
        (f"{AHEAD}test_what_follows_the_end_of_a_request_is_forgotten",)),
    Mutation("a step that computes nothing is committed before the one in flight", "stages/generate/loop/worker.py",
        "elif self._flights:", "elif False:", (f"{OVERLAP}test_what_waits_for_the_step_in_flight[cancel]", STORIES)),
    Mutation("a takeover is committed before the step in flight", "stages/generate/loop/worker.py",
        "ahead = self._overlap and not takes_over and not self._suspects", "ahead = self._overlap",
        (f"{OVERLAP}test_what_waits_for_the_step_in_flight[takeover]", STORIES)),
)  # fmt: skip
