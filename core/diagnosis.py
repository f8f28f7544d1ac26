"""Which hypothesis explains a gradInput: scores all on sample boxes, confirms the best on the whole tensor, ranks.

Every element of the winner has been compared. The rest of the table is what the sample says, unless `whole`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .agreement import Agreement, agree
from .evidence import Equal, Evidence, box_around, box_size, sample_boxes
from .formats import FORMATS
from .hypotheses import FAULTS, PARAMETERS, PARTIAL, Base, Call, Hypothesis, plan_of
from .inference import calls_that_fit
from .operators import available_cpus
from .prediction import Free, Plan, Predictor
from .status import AclnnError
from .tensors import TensorSpec
from .tiles import Box, TileSource, Tiling

SCREEN = 1 << 13
"""Elements that decide which windows are worth a sample."""
TILE = 1 << 17
ROUNDS = 4
MOST_CONFIRMED = 6
MOST_BASES = 3
FAR_FEWER = 20
"""So many times fewer inexact elements are a better explanation, where both are within an ulp."""
HOPELESS = 0.01
"""Share of a screen of the sample below which a hypothesis is not tried on all of it."""
MOST_DIVIDED = 24
"""Windows for which a divisorOverride is looked for."""
MOST_WRONG = 12
"""Boxes around errors by which the sample grows at once."""

_FAULT_KEYS = frozenset(entry.key for entry in FAULTS)
_PARAMETER_KEYS = frozenset(entry.key for entry in PARAMETERS)

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Explanation:
    """One hypothesis and how much it explains.

    key: its key in the table, `as_believed`, `adaptive2d` or `windows`; phrase: what it is, to read well after "This
    is "; call: the call it starts from. whole: whether all of the tensor was compared, or the sample alone.
    same: others that predict the same. idle: among them, one that changes nothing about a call that is among them.
    """

    key: str
    phrase: str
    sentence: str
    call: Call
    plan: Plan
    agreement: Agreement
    whole: bool = False
    digest: bytes = b""
    same: tuple[Explanation, ...] = ()
    idle: bool = False

    @property
    def rivals(self) -> list[Explanation]:
        """What predicts the same and would have to be told apart."""
        return [other for other in self.same if not other.idle]

    @property
    def explains(self) -> bool:
        """Whether it explains every element it was compared with.

        Sums in 16 bits may be off by a step of any of them, and are believed if most elements are exact; a race, if
        nine of ten elements are right as it is, and most of the others off by more than roundings would make them.
        """
        found = self.agreement
        if found.matched + found.allowed < found.total or found.total == 0:
            return False
        if self.plan.free is Free.OVERLAP:
            return found.allowed > 0 and 10 * found.matched >= 9 * found.total and 2 * found.coarse >= found.allowed
        return self.plan.sums is None or 2 * found.exact >= found.total

    @property
    def explained(self) -> int:
        """Elements explained; what was left unwritten counts, what a race spoiled does not."""
        return self.agreement.matched + (self.agreement.allowed if self.key == "unwritten" else 0)

    @property
    def inexact(self) -> float:
        """Share of the elements that it does not predict bit for bit."""
        return 1 - self.agreement.exact / max(self.agreement.total, 1)

    @property
    def rank(self) -> tuple[object, ...]:
        """Sorts the best first; among equals, the order in which they were tried decides."""
        found = self.agreement
        return (
            not (self.explains and self.key not in PARTIAL),
            not self.explains,
            -self.explained / max(found.total, 1),
            self.key in PARTIAL,
            -found.exact / max(found.total, 1),
            self.key != "as_believed",
        )


@dataclass(frozen=True)
class Diagnosis:
    """The outcome: explanations, best first.

    believed: the call as it was believed to be; refusal: why the operator rejects it, if so. note: what is to be
    known of the comparison.
    """

    elements: int
    ranked: tuple[Explanation, ...]
    refusal: str | None = None
    believed: Call | None = None
    note: str | None = None

    @property
    def found(self) -> Explanation | None:
        """What explains every element of the tensor, or None."""
        best = self.ranked[0] if self.ranked else None
        return best if best is not None and best.whole and best.explains else None

    @property
    def as_believed(self) -> bool:
        """Whether that is the call as believed."""
        found = self.found
        return found is not None and any(one.key == "as_believed" for one in (found, *found.same))


# ---- Hypotheses


@dataclass(frozen=True)
class Tensors:
    """What is known of the three tensors before they are read. adaptive: adaptive2d, which always fits them."""

    adaptive: Call
    actual_dtype: str

    @classmethod
    def checked(cls, grad_output: TensorSpec, self: TensorSpec, actual: TensorSpec, product: str) -> Tensors:
        """Raise AclnnError for tensors that no call takes, and for an `actual` that cannot be compared."""
        call = Call("adaptive2d", grad_output, self, product)
        call.check()
        if actual.shape != self.shape:
            raise AclnnError(f"ACTUAL is {actual}; expected {self}, as self{_order_hint(actual, self)}")
        taken = list(FORMATS) if self.dtype == "float32" else ["float32", self.dtype]
        if actual.dtype not in taken:
            raise AclnnError(f"ACTUAL is {actual.dtype} and self {self.dtype}; expected {' or '.join(taken)}")
        return cls(call, actual.dtype)

    @property
    def note(self) -> str | None:
        """What is done where ACTUAL has another dtype than self."""
        own = self.adaptive.self.dtype
        if self.actual_dtype == own:
            return None
        if own == "float32":
            return f"self is float32: predictions are rounded to {self.actual_dtype}, to compare them"
        return f"self is {own}: ACTUAL is rounded to it, to compare it"


def _order_hint(actual: TensorSpec, self: TensorSpec) -> str:
    channels, height, width = self.shape[-3:]
    orders = {"channels-last": (height, width, channels), "with H and W exchanged": (channels, width, height)}
    for name, order in orders.items():
        if actual.shape == (*self.shape[:-3], *order):
            return f"; it seems to be {name}, and is to be transposed"
    return ""


def diagnose(
    tensors: Tensors,
    grad_output: TileSource,
    actual: TileSource,
    believed: Call | None = None,
    operators: Sequence[str] = ("avg2d", "adaptive2d"),
    threads: int | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Explain `actual`, tiles of what a device made, as a gradInput of `grad_output`.

    believed: the call as it is believed to be, or None. operators: those that are tried. progress: called with the
    elements compared so far.
    """
    evidence = Evidence(tensors.adaptive, grad_output, actual, tensors.actual_dtype)
    search = _Search(evidence, believed, tuple(operators), threads or available_cpus(), progress)
    with np.errstate(all="ignore"):
        return replace(search.run(), believed=believed, note=tensors.note)


@dataclass(frozen=True)
class _Idea:
    """A hypothesis with its plan, before it is scored."""

    key: str
    phrase: str
    sentence: str
    call: Call
    plan: Plan


@dataclass
class _Search:
    evidence: Evidence
    believed: Call | None
    operators: tuple[str, ...]
    threads: int
    progress: Progress | None
    refusal: str | None = None
    compared: int = 0
    whole: dict[tuple[object, ...], tuple[Agreement, bytes]] = field(default_factory=dict)
    """By a plan's identity, how much of the whole tensor it explains, and a digest of what it predicts."""

    def run(self) -> Diagnosis:
        """Sample, confirm the best, and where the sample was too kind, add to it and start again."""
        ranked: list[Explanation] = []
        for _ in range(ROUNDS):
            ranked = self._rank(self._explanations())
            wrong: list[Box] = []
            while not wrong and ranked and _settles(ranked[0]) and not ranked[0].whole:
                wrong = self._confirm(_alike(ranked))
                ranked = self._rank(ranked)
            if not wrong:
                break
            self.evidence.sample += [box for box in wrong if box not in self.evidence.sample]
        ranked = self._confirm_nearest(ranked)
        if any(_settles(one) for one in ranked):
            ranked = [one for one in ranked if one.key not in PARTIAL]
        return self._as_computed(Diagnosis(self.evidence.call.self.size, tuple(_grouped(ranked)), self.refusal))

    def _confirm_nearest(self, ranked: list[Explanation]) -> list[Explanation]:
        """Where nothing explains it all, what comes nearest on the whole tensor; only one that is near to nothing."""
        for number in range(ROUNDS):
            if not ranked or ranked[0].whole or (number and _is_hopeless(ranked[0].agreement)):
                break
            self._confirm([ranked[0]])
            ranked = self._rank(ranked)
        return ranked

    def _as_computed(self, diagnosis: Diagnosis) -> Diagnosis:
        """Of a call that explains all, what is bit for bit as the operators here compute it is exact, too."""
        found, evidence = diagnosis.found, self.evidence
        if found is None or found.agreement.exact == found.agreement.total:
            return diagnosis
        same_dtype = evidence.actual_dtype == found.call.self.dtype
        if not (same_dtype and found.call.is_legal and plan_of(found.call).identity == found.plan.identity):
            return diagnosis
        equal = Equal(evidence.actual, evidence.actual_dtype)
        found.call.executor(self.threads).run(evidence.grad_output, equal)
        exact = max(found.agreement.exact, equal.count)
        counted = replace(found, agreement=replace(found.agreement, exact=exact))
        return replace(diagnosis, ranked=(counted, *diagnosis.ranked[1:]))

    def _rank(self, explanations: Iterable[Explanation]) -> list[Explanation]:
        """Best first, with what is known of the whole tensor.

        The call as believed, and then one with other parameters, gives way to none that explains as much, unless that
        leaves far fewer elements inexact: a weight rounded to the tensors' own 16 bits is never off by more than an
        ulp, and a divisorOverride is a constant factor, too.
        """
        ranked = sorted((self._known(one) for one in explanations), key=lambda one: one.rank)
        calls = [one for one in ranked if one.explains and one.key in _PARAMETER_KEYS | {"as_believed"}]
        for one in sorted(calls, key=lambda one: one.key != "as_believed"):
            if FAR_FEWER * ranked[0].inexact >= one.inexact:
                ranked.remove(one)
                return [one, *ranked]
        return ranked

    def _known(self, one: Explanation) -> Explanation:
        if one.plan.identity not in self.whole:
            return one
        agreement, digest = self.whole[one.plan.identity]
        return replace(one, agreement=agreement, digest=digest, whole=True)

    # -- What is tried

    def _explanations(self) -> list[Explanation]:
        """All hypotheses on the sample; windows that fit are searched for, and more tried on them, only at need."""
        found: list[Explanation] = []
        for base in self._bases():
            found += self._scored(_ideas_of(base, base.call.operator))
        found += self._adaptive(found)
        windows: list[Explanation] = []
        if "avg2d" in self.operators and not _explained(found):
            windows = self._windows()
        if not _explained(found + windows):
            known = [one for one in sorted(found, key=lambda one: one.rank) if one.key in _PARAMETER_KEYS]
            # Of what explains nothing, the likeliest windows may still need another precision, or hide a fault.
            for one in known[:MOST_BASES] + windows[:MOST_BASES]:
                found += self._scored(_ideas_beyond(Base(one.call, one.plan, self.evidence), one.phrase))
        return found + windows

    def _bases(self) -> list[Base]:
        """The believed call, legal or not."""
        if self.believed is None:
            return []
        try:
            self.believed.check()
        except AclnnError as error:
            self.refusal = str(error)
            return [Base(self.believed, None, self.evidence)]
        return [Base(self.believed, plan_of(self.believed), self.evidence)]

    def _adaptive(self, found: list[Explanation]) -> list[Explanation]:
        """adaptive2d, and its faults where it is not what has been tried already."""
        call = Call("adaptive2d", self.evidence.call.grad_output, self.evidence.call.self, self.evidence.call.product)
        if "adaptive2d" not in self.operators or call == self.believed:
            return []
        plan = plan_of(call)
        ideas = [_Idea("adaptive2d", "adaptive2d", "The operator is the adaptive one.", call, plan)]
        if not any(one.plan.identity == plan.identity for one in found) and not _explained(found):
            ideas += _faults_of(Base(call, plan, self.evidence), "adaptive2d")
        return self._scored(ideas)

    def _windows(self) -> list[Explanation]:
        """avg2d with any windows that fit the shapes, the likeliest by the sums of rows and columns."""
        evidence = self.evidence
        lines = evidence.lines(0), evidence.lines(1)
        boxes = sample_boxes(evidence.extents, SCREEN)
        screened = []
        pattern = self.believed if self.believed and self.believed.operator == "avg2d" else evidence.call
        for number, call in enumerate(calls_that_fit(pattern, lines)):
            for made in self._with_divisors(call) if number < MOST_DIVIDED else (call,):
                plan = plan_of(made)
                share = self._score(plan, boxes)[0].matched
                screened.append((share, made, plan))
        screened.sort(key=lambda item: (-item[0], item[1].divisor_override != 0))
        ideas = [
            _Idea("windows", str(call), "Another kernel, stride or padding fits the shapes.", call, plan)
            for _, call, plan in screened[: 2 * MOST_CONFIRMED]
        ]
        return self._scored(ideas)

    def _with_divisors(self, call: Call) -> Iterator[Call]:
        yield call
        if not call.count_include_pad:
            return
        plan = plan_of(replace(call, divisor_override=1))
        for divisor in self.evidence.divisors(plan)[:1]:
            if divisor != plan_of(call).common_divisor:
                yield replace(call, divisor_override=divisor)

    # -- Scores

    def _scored(self, ideas: Iterable[_Idea]) -> list[Explanation]:
        scored, screen = [], self.evidence.screen
        for idea in ideas:
            agreement, digest = self._score(idea.plan, screen)
            if not _is_hopeless(agreement):
                agreement, digest = self._score(idea.plan, self.evidence.sample)
            if idea.key in PARTIAL and not agreement.allowed:
                continue
            whole = self.evidence.complete
            scored.append(Explanation(**vars(idea), agreement=agreement, whole=whole, digest=digest))
        return scored

    def _score(self, plan: Plan, boxes: Sequence[Box]) -> tuple[Agreement, bytes]:
        predictor, digest, total = self.evidence.predictor(plan), hashlib.blake2b(digest_size=16), Agreement()
        digest.update(plan.free.encode())
        for box in boxes:
            where = box.planes, box.rows, box.columns
            predicted = predictor.values(*where)
            digest.update(predicted.data)
            total += agree(predictor, self.evidence.sampled(box), predicted, where, self.evidence.form)[0]
        return total, digest.digest()

    def _confirm(self, chosen: Sequence[Explanation]) -> list[Box]:
        """Compare the chosen on the whole tensor; boxes around where they are wrong."""
        unique = list({one.plan.identity: one.plan for one in chosen}.items())
        predictors = [self.evidence.predictor(plan) for _, plan in unique]
        agreements, digests = [Agreement() for _ in unique], [hashlib.blake2b(digest_size=16) for _ in unique]
        wrong: list[Box] = []
        tiles = Tiling.of(self.evidence.extents, TILE)
        for parts in self._tiles(tiles, lambda box: self._tile(predictors, box)):
            for index, (agreement, digest, place) in enumerate(parts):
                agreements[index] += agreement
                digests[index].update(digest)
                if place is not None and len(wrong) < MOST_WRONG:
                    wrong.append(place)
        for (identity, _), agreement, total in zip(unique, agreements, digests, strict=True):
            # A digest is made only where there is something to tell apart.
            self.whole[identity] = agreement, total.digest() if len(unique) > 1 else b""
        return wrong

    def _tile(self, predictors: Sequence[Predictor], box: Box) -> list[tuple[Agreement, bytes, Box | None]]:
        where = box.planes, box.rows, box.columns
        actual, results = self.evidence.values(box), []
        with np.errstate(all="ignore"):
            for predictor in predictors:
                predicted = predictor.values(*where)
                agreement, wrong = agree(predictor, actual, predicted, where, self.evidence.form)
                alone = len(predictors) == 1
                digest = b"" if alone else hashlib.blake2b(predicted.data, digest_size=16).digest()
                place = None if wrong is None or not wrong.any() else box_around(wrong, box)
                results.append((agreement, digest, place))
        return results

    def _tiles(self, boxes: Tiling, work: Callable[[Box], Any]) -> Iterator[Any]:
        """The results of all tiles in order, computed on threads, few of them ahead."""
        ahead = 4 * self.threads
        pool = ThreadPoolExecutor(self.threads)
        try:
            for first in range(0, len(boxes), ahead):
                part = [boxes[index] for index in range(first, min(first + ahead, len(boxes)))]
                for box, result in zip(part, pool.map(work, part), strict=True):
                    self.compared += box_size(box)
                    if self.progress:
                        self.progress(self.compared)
                    yield result
        finally:
            pool.shutdown(cancel_futures=True)


def _is_hopeless(agreement: Agreement) -> bool:
    return agreement.matched + agreement.allowed < HOPELESS * agreement.total


def _settles(one: Explanation) -> bool:
    """Whether it explains all that it was compared with, cell by cell."""
    return one.explains and one.key not in PARTIAL


def _alike(ranked: Sequence[Explanation]) -> list[Explanation]:
    """The best, and those that predict the same on the sample."""
    return [one for one in ranked if one.digest == ranked[0].digest and not one.whole][:MOST_CONFIRMED]


def _explained(found: Iterable[Explanation]) -> bool:
    return any(_settles(one) for one in found)


def _ideas_of(base: Base, label: str) -> Iterator[_Idea]:
    """The believed call, its other parameters, and its faults."""
    if base.plan is not None:
        yield _Idea("as_believed", f"{label} as believed", "The call as it is believed to be.", base.call, base.plan)
    for hypothesis in PARAMETERS:
        if base.call.operator in hypothesis.operators:
            for call, detail in hypothesis.change(base):
                if call.is_legal:
                    yield _idea(hypothesis, detail, f"{label} with", call, plan_of(call))
    if base.plan is not None:
        yield from _faults_of(base, label)


def _ideas_beyond(base: Base, label: str) -> Iterator[_Idea]:
    """What is tried on a call that was not believed: no other windows, and faults that predict every cell.

    Cells may be left open only on a call that somebody believes in: on any call they explain too much.
    """
    for hypothesis in PARAMETERS:
        if hypothesis.key in ("divisor_override", "cube_math_type") and base.call.operator in hypothesis.operators:
            for call, _ in hypothesis.change(base):
                if call.is_legal:
                    yield _Idea(hypothesis.key, str(call), hypothesis.sentence, call, plan_of(call))
    yield from (idea for idea in _faults_of(base, label) if idea.key not in PARTIAL)


def _faults_of(base: Base, label: str) -> Iterator[_Idea]:
    joined = f"{label}, and with" if " with " in label else f"{label} with"
    for hypothesis in FAULTS:
        if base.call.operator in hypothesis.operators:
            for plan, detail in hypothesis.change(base):
                yield _idea(hypothesis, detail, joined, base.call, plan)


def _idea(hypothesis: Hypothesis, detail: str, start: str, call: Call, plan: Plan) -> _Idea:
    name = hypothesis.name.format(detail).strip()
    return _Idea(hypothesis.key, f"{start} {name}", hypothesis.sentence, call, plan)


def _grouped(ranked: Sequence[Explanation]) -> Iterator[Explanation]:
    """One explanation for those that predict the same, the first one, which names the others."""
    groups: dict[object, list[Explanation]] = {}
    for one in ranked:
        # What was compared as a whole has digests of the whole; identical plans share one.
        key = (one.whole, one.digest or one.plan.identity)
        groups.setdefault(key, []).append(one)
    for first, *others in groups.values():
        members = [first, *({other.phrase: other for other in others if other.phrase != first.phrase}).values()]
        same = [replace(other, idle=_is_idle(other, members)) for other in members[1:]]
        yield replace(first, same=tuple(sorted(same, key=lambda other: other.idle)))


def _is_idle(one: Explanation, group: Sequence[Explanation]) -> bool:
    """Whether it changes a call of the group by something that makes no difference."""
    if one.key == "both_modes":
        return any(other.key in ("as_believed", "count_include_pad", "ceil_mode") for other in group)
    return one.key in _FAULT_KEYS and any(one.call == other.call for other in group if other.key not in _FAULT_KEYS)
