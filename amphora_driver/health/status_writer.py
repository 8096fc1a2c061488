# SPDX-License-Identifier: Apache-2.0
"""From what amphorae said to what the store says, in batches.

Invariant: the store hears of changes only, and a batch that could not be written is computed again at the next one,
whether or not its amphorae are heard again: nothing here is a queue that could overflow or be lost. What an amphora
says counts for its own load balancer alone, and nothing it says can keep those of others from being written down.
However many load balancers were heard, a flush is one reading and at most one writing transaction (`batch.py`).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from amphora_driver.errors import ContentRefused, UnknownObject
from amphora_driver.health import statistics
from amphora_driver.health.drift_reports import Drifts
from amphora_driver.health.lost_configs import Losses
from amphora_driver.health.stale_connections import Leftovers
from amphora_driver.health.status import Report, Statuses, operating_statuses
from amphora_driver.health.write_batch import Batches, Entry
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.store import amphorae, config_drift, desired_objects, status_outbox
from amphora_driver.store.amphorae import LastHeartbeat
from amphora_driver.untrusted_text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import sqlalchemy as sa

    from amphora_driver.database.engine import Database
    from amphora_driver.health.amphora_reports import Ledger, Seen
    from amphora_driver.health.drift_reports import Broken
    from amphora_driver.health.lost_configs import Loss

LOG = logging.getLogger(__name__)

# How often it is written down that an amphora was heard, in seconds: the only write of a quiet system.
_SEEN_EVERY = 1.0
# How often what belongs to amphorae and load balancers that are gone is dropped, in seconds.
_TIDIED_EVERY = 60.0
_LONGEST_REASON = 255


class _Account(msgspec.Struct):
    """What is known of one load balancer: its tree, and what was written down last.

    Attributes:
        tree: None if it is not wanted any more.
        served: the newest generation an amphora served when the tree was read.
        written: statuses written down.
        flushed: counters written down.
        mute: those of its amphorae that fell silent while a partner of theirs is heard.
    """

    tree: LoadBalancer | None = None
    served: int = -1
    written: Statuses = {}
    flushed: dict[statistics.Key, statistics.Row] = {}
    mute: frozenset[str] = frozenset()

    def doubt(self, load_balancer_id: str, recorded: str | None) -> None:
        """Somebody else has written the load balancer's status, while nobody was heard: what is heard is news again."""
        mine = self.written.get(load_balancer_id)
        if mine is not None and mine.status.value != recorded:
            self.written = {one: known for one, known in self.written.items() if one != load_balancer_id}

    def keep(self, amphora_ids: Iterable[str]) -> None:
        """Drop the counters of other amphorae than these, and of listeners that are gone; losing more harms nothing."""
        kept = set(amphora_ids)
        listeners = {listener.id for listener in self.tree.listeners} if self.tree is not None else set()
        self.flushed = {key: row for key, row in self.flushed.items() if key[0] in listeners and key[1] in kept}


class _Word(msgspec.Struct, frozen=True):
    """What the amphorae of one load balancer say at the moment.

    Attributes:
        reports: of all of them: whoever served requests has counted them.
        trusted: those of them whose word about members and listeners counts.
        drifting: those that are noted not to be as wanted.
    """

    load_balancer_id: str
    account: _Account
    reports: dict[str, Report]
    trusted: tuple[str, ...]
    confirmed: dict[str, int]
    drifting: set[str]


class _News(msgspec.Struct, frozen=True):
    """What is to be written for one load balancer, and what will be known to be written then."""

    account: _Account
    found: Statuses
    entry: Entry


class Bookkeeper:
    """Writes down what the ledger learned. For one thread.

    Args:
        database: where to.
        ledger: what amphorae said.
        interval: seconds between an amphora's heartbeats.
        due: called when a load balancer has become due, because an amphora lost what it served.
        gone: called with the ids of amphorae that were heard and are not recorded any more.
    """

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        interval: float = 3.0,
        due: Callable[[], None] = lambda: None,
        gone: Callable[[set[str]], None] = lambda _amphora_ids: None,
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._losses = Losses(interval)
        self._leftovers = Leftovers(ledger.expiry)
        self._drifts = Drifts(interval)
        self._due = due
        self._gone = gone
        self._batches = Batches(database)
        self._accounts: dict[str, _Account] = {}
        # Heard, but what follows from that is not written down yet.
        self._unwritten: dict[str, Seen] = {}
        # Heard, but that is not written down yet.
        self._seen: dict[str, LastHeartbeat] = {}
        self._seen_at = 0.0
        self._tidied_at = time.monotonic()

    def flush(self, *, last: bool = False) -> bool:
        """Write down what changed since the last flush; True if there is something new for Octavia.

        Args:
            last: there will be no other flush, so nothing is put off.

        Raises:
            StoreError: the database is away; the same is tried at the next flush.
        """
        self._unwritten.update(self._ledger.take_heard())
        words = self._database.read(self._words) if self._unwritten else []
        now = time.monotonic()
        changed = self._write([news for word in words if (news := self._news(word)) is not None], last=last)
        self._note(self._note_losses, words, now)
        self._note(self._note_drifts, words, now)
        self._unwritten.clear()
        ended = self._end_connections()
        self._tidy()
        return changed or ended

    def _end_connections(self) -> bool:
        """Now and then, take out of the sums what amphorae had that nobody hears any more."""
        now = time.monotonic()
        if not self._leftovers.due(now):
            return False
        heard = self._ledger.heard_since(now - self._ledger.expiry)
        rows = self._database.read(lambda connection: self._leftovers.among(connection, heard))
        if rows:
            self._database.write(lambda connection: statistics.store(connection, rows))
        self._leftovers.looked(now)
        for row in rows:
            if (account := self._accounts.get(row.load_balancer_id)) is not None:
                statistics.remember(account.flushed, [row])
        return bool(rows)

    def _words(self, connection: sa.Connection) -> list[_Word]:
        """What every load balancer with unwritten amphorae says now, its account brought up to date."""
        recorded = amphorae.load_serving_states(connection, list(self._unwritten))
        self._note_seen({amphora_id for one in recorded.values() for amphora_id in one.amphorae})
        now = time.monotonic()
        words = []
        for load_balancer_id, one in sorted(recorded.items()):
            trusted = [amphora_id for amphora_id, state in one.amphorae.items() if state is not AmphoraState.RETIRING]
            reports = self._ledger.reports(one.amphorae, now)
            speaker = self._ledger.speaker(trusted, now)
            heard = (speaker,) if speaker is not None else tuple(each for each in trusted if each in reports)
            account = self._accounts.setdefault(load_balancer_id, _Account())
            self._note_mute(load_balancer_id, account, [each for each in trusted if each not in reports])
            newest = max((reports[each].generation or 0 for each in trusted if each in reports), default=0)
            # No amphora can serve what was never wanted; one that says so must not make us read at every heartbeat.
            served = min(newest, one.generation)
            if served > account.served:
                # Read anew, it also has what the last one had not: a tree that was incomplete, objects that are new.
                # What was said of objects before their rows existed was not written, and is written now.
                account.tree, account.served, account.written = _tree(connection, load_balancer_id), served, {}
                account.keep(one.amphorae)
            account.doubt(load_balancer_id, one.operating)
            words.append(_Word(load_balancer_id, account, reports, heard, one.confirmed, one.drifting))
        return words

    def _note_mute(self, load_balancer_id: str, account: _Account, silent: list[str]) -> None:
        """Say it once in the log: no status tells, because no client notices as long as the other one serves."""
        mute = frozenset(each for each in silent if self._ledger.last_seen(each) is not None)
        for amphora_id in sorted(mute - account.mute):
            LOG.warning("load balancer %s: amphora %s is silent, its partner is heard", load_balancer_id, amphora_id)
        account.mute = mute

    def _note(self, note: Callable[[list[_Word], float], None], words: list[_Word], now: float) -> None:
        """Note something of all load balancers. Where the database refuses that, note it of their halves."""
        try:
            note(words, now)
        except ContentRefused as error:
            if len(words) == 1:
                self._batches.refuse(words[0].load_balancer_id, error)
                return
            half = len(words) // 2
            self._note(note, words[:half], now)
            self._note(note, words[half:], now)

    def _note_losses(self, words: list[_Word], now: float) -> None:
        """Have the load balancers of amphorae that lost what they served pushed again."""
        confirmed = {amphora_id: generation for word in words for amphora_id, generation in word.confirmed.items()}
        heard = {amphora_id: seen for amphora_id, seen in self._unwritten.items() if amphora_id in confirmed}
        losses = self._losses.among(heard, confirmed, now)
        if not losses:
            return

        def write(connection: sa.Connection) -> list[Loss]:
            config_drift.lock_work_of_amphorae(connection, [one.amphora_id for one in losses])
            return [
                one for one in losses if amphorae.lower_confirmed(connection, one.amphora_id, one.confirmed, one.serves)
            ]

        lost = self._database.write(write)
        for one in lost:
            LOG.warning(
                "amphora %s confirmed generation %d and serves %d: it is given its configuration again",
                one.amphora_id,
                one.confirmed,
                one.serves,
            )
        self._losses.settled(losses)
        if lost:
            self._due()

    def _note_drifts(self, words: list[_Word], now: float) -> None:
        """Write down what amphorae found of themselves, and have those pushed again that could not mend it."""
        confirmed = {amphora_id: generation for word in words for amphora_id, generation in word.confirmed.items()}
        heard = {amphora_id: seen for amphora_id, seen in self._unwritten.items() if amphora_id in confirmed}
        marks = self._drifts.marks(heard, confirmed, {one for word in words for one in word.drifting})
        broken, news = self._drifts.among(heard, confirmed, now), self._drifts.news(heard, now)
        if not (broken or news or marks):
            return

        def write(connection: sa.Connection) -> tuple[int, list[str]]:
            config_drift.lock_work_of_amphorae(connection, [one.amphora_id for one in broken])
            config_drift.set_drifting(connection, marks)
            told = [
                amphora_id
                for amphora_id, one in sorted(news.items())
                if config_drift.record_agent_finding(connection, amphora_id, _plain(one.sentence), one.moment)
            ]
            taken = sum(
                config_drift.revoke_confirmation(
                    connection, one.amphora_id, one.confirmed, _plain(_why(one)), replug=one.replug
                )
                for one in broken
            )
            return taken, told

        due, told = self._database.write(write)
        for amphora_id in told:
            LOG.warning("amphora %s was not as confirmed: %s", amphora_id, _plain(news[amphora_id].sentence))
        for one in broken:
            LOG.warning("amphora %s is given its configuration again: %s", one.amphora_id, _plain(_why(one)))
        self._drifts.settled(broken, now)
        self._drifts.told(heard, now)
        if due:
            self._due()

    def _note_seen(self, recorded: set[str]) -> None:
        self._ledger.forget(self._unwritten.keys() - recorded)
        for amphora_id in self._unwritten.keys() & recorded:
            seen = self._unwritten[amphora_id]
            epoch, sequence = seen.order
            self._seen[amphora_id] = LastHeartbeat(
                amphora_id=amphora_id,
                at=seen.wall,
                generation=seen.generation,
                epoch=epoch,
                sequence=sequence,
                holds_vip=seen.holds_vip,
                agent_version=seen.agent_version,
            )

    def _news(self, word: _Word) -> _News | None:
        try:
            return _news(word)
        except (ValueError, ArithmeticError, LookupError) as error:
            # A report that no rule foresees must not keep those of other load balancers from being written.
            self._batches.refuse(word.load_balancer_id, error)
            return None

    def _write(self, news: list[_News], *, last: bool) -> bool:
        entries = [one.entry for one in news if one.entry.rows or one.entry.news]
        now = time.monotonic()
        seen = list(self._seen.values()) if last or now - self._seen_at >= _SEEN_EVERY else []
        if not (entries or seen):
            return False
        written = self._batches.write(entries, seen)
        for one in news:
            entry = one.entry
            if entry.load_balancer_id not in written.entries:
                continue
            if entry.news:
                one.account.written = one.found
            statistics.remember(one.account.flushed, entry.rows)
        if seen:
            self._seen.clear()
            self._seen_at = now
        return bool(written.differing or any(one.rows for one in entries if one.load_balancer_id in written.entries))

    def _tidy(self) -> None:
        """Once in a while, drop what is remembered of amphorae and load balancers that are gone."""
        if time.monotonic() - self._tidied_at < _TIDIED_EVERY:
            return
        # In this order: an amphora's row is written before it can be heard, so one that was heard and has none is gone.
        remembered = self._ledger.remembered()
        owners = self._database.read(amphorae.load_balancer_ids)
        self._ledger.forget(remembered - owners.keys())
        self._gone(remembered - owners.keys())
        self._seen = {amphora_id: one for amphora_id, one in self._seen.items() if amphora_id in owners}
        self._losses.keep(set(owners))
        self._drifts.keep(set(owners))
        served = set(owners.values())
        self._accounts = {one: account for one, account in self._accounts.items() if one in served}
        for account in self._accounts.values():
            account.keep(owners)
        self._batches.tidy()
        self._tidied_at = time.monotonic()


def _tree(connection: sa.Connection, load_balancer_id: str) -> LoadBalancer | None:
    try:
        return desired_objects.load_tree(connection, load_balancer_id)
    except UnknownObject:
        return None


def _news(word: _Word) -> _News:
    """What differs from what was written down last."""
    account = word.account
    if account.tree is None:
        return _News(account, {}, Entry(word.load_balancer_id))
    found = operating_statuses(account.tree, [word.reports[each] for each in word.trusted])
    written = account.written
    news = [
        status_outbox.Observation(object_id=object_id, kind=one.kind, operating=one.status, reason=_plain(one.reason))
        for object_id, one in found.items()
        if object_id not in written or written[object_id].status is not one.status
    ]
    batch = statistics.changed(
        word.reports,
        dict.fromkeys(word.reports, word.load_balancer_id),
        {listener.id: word.load_balancer_id for listener in account.tree.listeners},
        account.flushed,
    )
    # A silent amphora has no connections any more. Its other counters stay.
    ended = statistics.ended(account.flushed, word.reports)
    return _News(account, found, Entry(word.load_balancer_id, news, (*batch.rows, *ended)))


def _why(one: Broken) -> str:
    why = f"its agent cannot mend what is not as confirmed: {one.words}"
    return f"{one.moment}, {why}" if one.moment else why


def _plain(reason: str) -> str:
    """A reason every database can hold: it quotes the amphora."""
    return printable(reason, _LONGEST_REASON)
