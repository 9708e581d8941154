"""What came of computing a request again: where its tokens differ from the recorded ones, and what explains it.

First as plain data, for --json, then as lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ops.connection import counted, one_line
from ops.replay.compute import Computes, why_failed
from pipeline.events import Logprob
from pipeline.replaying import scored
from pipeline.sampling import MOST_LOGPROBS
from pipeline.views.recorded import Comparison, Difference, History, Maker

SHOWN: Final = 5
"""Most probable tokens that are shown."""


def report(
    history: History, replays: Sequence[History], computer: Computes | None = None, served: Sequence[str] = ()
) -> dict[str, Any]:
    """Compare the *replays* of a request with it, and look into each difference with the help of *computer*, if given.
    *served* are the models of the server that computed them, if it has told them.

    `identical` is the number of replays without a difference. Equal differences are one item of `differences`: it says
    how many `times` and in which `replays`. `other_weights` and `not_served` are there if the model was another one.
    """
    differing: dict[Comparison, list[History]] = {}
    for now in replays:
        differing.setdefault(history.compare(now), []).append(now)
    return {
        "uid": history.uid,
        "tokens": len(history.tokens),
        "times": len(replays),
        "replays": [now.uid for now in replays],
        "identical": sum(len(those) for compared, those in differing.items() if compared.is_identical),
        "differences": [
            {"times": len(those), "replays": [now.uid for now in those]}
            | different(history, those[0], compared, computer)
            for compared, those in differing.items()
            if not compared.is_identical
        ],
        **_other_model(history, replays, served),
    }


def computed_report(
    history: History, replays: Sequence[History], computer: Computes, served: Sequence[str] = ()
) -> dict[str, Any]:
    """As `report`, of *replays* by *computer*; with `failed`, why one of them has no answer of its own."""
    failures = [failure for now in replays if (failure := why_failed(now))]
    return report(history, replays, computer, served) | ({"failed": failures[0]} if failures else {})


def _other_model(history: History, replays: Sequence[History], served: Sequence[str]) -> dict[str, Any]:
    """Say which model computed the *replays*, if that is not the recorded one. Equal tokens do not tell that."""
    model = history.submitted.model if history.submitted is not None else ""
    recorded = history.maker.weights
    others = dict.fromkeys(now.maker.weights for now in replays if now.maker.weights not in ("", recorded))
    told: dict[str, Any] = {}
    if recorded and others:
        told["other_weights"] = {"model": model, "recorded": recorded, "now": list(others)}
    if model and served and model not in served:
        told["not_served"] = {"model": model, "served": list(served)}
    return told


def different(history: History, now: History, compared: Comparison, computer: Computes | None = None) -> dict[str, Any]:
    """Return all that is known of a difference between a recorded answer and the one of *now*.

    *computer* is asked which tokens are probable in its place.
    """
    if compared.difference is None:
        failure = why_failed(now)
        return {"other": compared.other} | ({"failed": failure} if failure else {})
    place = compared.difference
    index = place.n - 1
    recorded_by = history.tokens[index].by if index < len(history.tokens) else history.maker
    made_by = now.tokens[index].by if index < len(now.tokens) else now.maker
    told: dict[str, Any] = {"n": place.n, "recorded": {"token": place.recorded}, "now": {"token": place.now}}
    told["explained_by"] = explanations(recorded_by, made_by)
    score = history.tokens[index].score if index < len(history.tokens) else None
    if score is not None:
        told["recorded_scores"] = score.model_dump(mode="json")
    if computer is not None:
        told |= _probable(history, place, computer)
    return told


def _probable(history: History, place: Difference, computer: Computes) -> dict[str, Any]:
    """Return the most probable tokens in the place of a difference, and how probable the two tokens are there."""
    tokens = [token for token in (place.recorded, place.now) if token is not None]
    best, theirs = (
        _score_of(each) for each in computer.compute([scored(history, place.n), scored(history, place.n, tokens)])
    )
    if best is None or theirs is None:
        return {}
    ranks = {candidate.token: rank for rank, candidate in enumerate(best.top, 1)}
    known = {candidate.token: candidate for candidate in (*best.top, *theirs.top)}

    def stands(token: int | None) -> dict[str, Any]:
        if token is None:
            return {"token": None}
        return {"token": token, "text": known[token].text, "logprob": known[token].logprob, "rank": ranks.get(token)}

    return {
        "recorded": stands(place.recorded),
        "now": stands(place.now),
        "most_probable": [candidate.model_dump(mode="json") for candidate in best.top[:SHOWN]],
    }


def _score_of(history: History) -> Logprob | None:
    return history.tokens[0].score if history.tokens else None


def lines_of(told: Mapping[str, Any]) -> list[str]:
    """Return a report in lines."""
    uid, times, identical = told["uid"], told["times"], told["identical"]
    tokens = counted(told["tokens"], "token")
    lines = []
    if "failed" in told:
        lines.append(f"{uid}: could not be computed again: {one_line(told['failed'])}")
    if "died" in told:
        lines.append(f"{uid}: its process died: {told['died']}")
    if told.get("beyond", 0) > 0:
        more = counted(told["beyond"], "token")
        lines.append(f"{uid}: its process made {more} more than were recorded, and did not die")
    lines += [f"  {one_line(line)}" for line in told.get("output", ())]
    if times > 1:
        lines.append(f"{uid}: {identical} of {times} identical, {tokens}")
    elif identical and told["tokens"]:
        lines.append(f"{uid}: identical, {tokens}")
    for found in told["differences"]:
        if times == 1 and found.get("failed", "") == told.get("failed"):
            continue  # the first line says it
        where = f"token {found['n']} differs" if "n" in found else one_line(found["other"])
        count = f"{found['times']} times: " if times > 1 else ""
        of_all = "" if "failed" in found else f", of {tokens}"
        lines += [f"{uid}: {count}{where}{of_all}", *(f"  {line}" for line in details_of(found))]
    return lines + [f"  {one_line(line)}" for line in _models_of(told)]


def _models_of(told: Mapping[str, Any]) -> list[str]:
    """Return lines that name both models, if another one computed the replay."""
    lines = []
    if other := told.get("other_weights"):
        model = f" (model {other['model']})" if other["model"] else ""
        lines.append(f"recorded with weights {other['recorded']}{model}, computed with {', '.join(other['now'])}")
    if other := told.get("not_served"):
        lines.append(f"the recorded model {other['model']} is not served there; served: {', '.join(other['served'])}")
    return lines


def details_of(found: Mapping[str, Any]) -> list[str]:
    """Return what is known of a difference, in lines."""
    if "n" not in found:
        return []
    lines = [f"{name:<9} {_token(found[name])}" for name in ("recorded", "now")]
    if "recorded_scores" in found:
        score = found["recorded_scores"]
        lines.append(f"recorded log-probability {short(score['logprob'])}; {_candidates(score['top'])}")
    if "most_probable" in found:
        lines.append(f"most probable now: {_candidates(found['most_probable'])}")
    reasons = found["explained_by"]
    return lines + ([f"explained by {reason}" for reason in reasons] or ["nothing recorded explains it"])


def _token(one: Mapping[str, Any]) -> str:
    if one["token"] is None:
        return "the answer had ended"
    if "text" not in one:
        return f"token {one['token']}"
    rank = f"number {one['rank']}" if one["rank"] else f"not among the {MOST_LOGPROBS} most probable"
    return f"{_quoted(one['text'])} (token {one['token']}), log-probability now {short(one['logprob'])}, {rank}"


def _candidates(candidates: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{_quoted(each['text'])} {short(each['logprob'])}" for each in candidates)


def short(logprob: float) -> str:
    """Return a log-probability for people."""
    return f"{logprob + 0.0:.4g}"  # no minus before a zero


def _quoted(text: str) -> str:
    return f'"{one_line(text)}"'


OF_KERNELS: Final = ("dtype", "quantization", "kernels", "version of the kernels", "page size", "torch")
"""The parts of numerics where the CPU kernels compute: `Settings.numerics` writes them."""
OF_TORCH: Final = ("dtype", "quantization", "torch", "attention")
"""The parts where torch computes."""
NAMED: Final[Mapping[str, str]] = {
    "sampler": "sampler-1",
    "llguidance": "",
    "deterministic": "deterministic-no",
    "fused": "fused-no",
    "new": "new-no",
    "transformers": "transformers-no",
    "rope": "rope-none",
    "ranks": "ranks-1",
}
"""The parts that begin with their name, and what the numerics mean that lack one; nothing: that is not known."""


def explanations(recorded: Maker, now: Maker) -> list[str]:
    """Return every reason for other tokens that the histories hold; none: nothing recorded explains them."""
    found = changes(recorded, now)
    if not (recorded.numerics and now.numerics):
        return [*found, "one of the histories does not say how its engine computed"]
    mine = parts_of(recorded.numerics)
    if not found and "attention" in mine and mine["deterministic"] == NAMED["deterministic"]:
        found.append("torch computed it, and its results depend on the batch and on the number of threads")
    return found


def changes(recorded: Maker, now: Maker) -> list[str]:
    """Return what the two histories say differently of their engines. That may change a token, and need not."""
    mine, theirs = (parts_of(each.numerics) if each.numerics else {} for each in (recorded, now))
    pairs = [
        ("weights", recorded.weights, now.weights),
        ("version of MiniSGL", recorded.version, now.version),
        *((name, part, theirs[name]) for name, part in mine.items() if name in theirs),
    ]
    return [
        f"{name}: recorded {before}, now {after}"
        for name, before, after in pairs
        if before and after and before != after
    ]


def parts_of(numerics: str) -> Mapping[str, str]:
    """Return the parts of an engine's numerics by their names. Where torch computes, that is the part `kernels`."""
    parts = [part for part in numerics.split("/") if part.partition("-")[0] not in NAMED]
    named = {name: part for part in numerics.split("/") if (name := part.partition("-")[0]) in NAMED}
    names = next((names for names in (OF_KERNELS, OF_TORCH) if len(names) == len(parts)), ())
    if not names:
        return {"numerics": numerics}
    known = {name: part for name, part in {**NAMED, **named}.items() if part}
    return {"kernels": "torch"} | dict(zip(names, parts, strict=True)) | known
