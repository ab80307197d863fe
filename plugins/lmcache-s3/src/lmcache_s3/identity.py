"""Who signs: fixed keys, or whatever botocore finds (profile, environment, container, instance), renewed in time."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from lmcache_core import BackendError, BackendUnavailable, ConfigError

from .options import S3Options
from .wire import Deadline

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

log = logging.getLogger(__name__)

_FRESH_S: Final = 60.0
"""Younger credentials are used without asking botocore, which renews them from 15 minutes before their end."""
_USABLE_S: Final = 300.0
"""Older ones are used while new ones are on their way, up to this age."""
_RENEW_INTERVAL_S: Final = 10.0
"""A server that refuses every token as expired does not make us ask for another at each call."""
_DEFAULT_REGION: Final = "us-east-1"


class Identity:
    """Gives the credentials of the moment.  Nothing is looked up before the first request."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._changed = threading.Condition()
        self._known: ReadOnlyCredentials | None = None
        self._known_at = float("-inf")
        self._problem = ""
        self._asking = False
        self._renewed_at = float("-inf")
        self._source: object = None

    def credentials(self, deadline: Deadline) -> ReadOnlyCredentials | None:
        """What to sign with, None for anonymous requests.  BackendUnavailable if nobody says in time who we are."""
        options = self._options
        if options.anonymous:
            return None
        with self._changed:
            if options.access_key_id:
                self._known = self._known or _fixed(options)
                return self._known
            age_s = time.monotonic() - self._known_at
            if age_s > _FRESH_S and not self._asking:
                self._asking, self._problem = True, ""
                threading.Thread(target=self._ask, name="lmcache-s3-credentials", daemon=True).start()
            if self._known is None or age_s > _USABLE_S:
                # That thread does I/O which knows no deadline of ours.
                self._changed.wait_for(lambda: not self._asking, deadline.left())
                if self._asking:
                    raise BackendUnavailable("no credentials: their source has not answered in time")
                if self._problem:
                    raise BackendError(self._problem)
            return self._known

    def renew(self) -> bool:
        """The server refused our token as expired: have another asked for; False where there is none to be had."""
        if self._options.access_key_id or self._options.anonymous:
            return False
        now = time.monotonic()
        with self._changed:
            if now - self._renewed_at < _RENEW_INTERVAL_S:
                return False
            self._renewed_at = now
            self._known, self._known_at, self._source = None, float("-inf"), None
        return True

    def _ask(self) -> None:
        found, problem = None, ""
        try:
            found = self._look_up()
            if found is None:
                problem = (
                    "no credentials: give access_key_id and secret_access_key, or profile, or an environment that has "
                    "them; or say anonymous: true"
                )
        except Exception as error:  # botocore raises many kinds, none of which may reach the tier
            problem = f"no credentials: {type(error).__name__}"
            log.debug("credentials of profile %s: %s", self._options.profile, type(error).__name__)
        with self._changed:
            self._asking, self._problem = False, problem
            if found is not None:
                self._known, self._known_at = found, time.monotonic()
            self._changed.notify_all()

    def _look_up(self) -> ReadOnlyCredentials | None:
        if self._source is None:
            self._source = _session(self._options.profile).get_credentials()
        source = self._source
        frozen = None if source is None else source.get_frozen_credentials()  # type: ignore[attr-defined]
        return frozen if frozen is not None and frozen.access_key else None


def region_of(options: S3Options) -> str:
    """The region to sign for.  Reads files and the environment where no option says it; no network."""
    if options.region is not None:
        return options.region
    if options.access_key_id and options.endpoint is not None:
        return _DEFAULT_REGION
    region = _session(options.profile).get_config_variable("region")
    return region if isinstance(region, str) and region else _DEFAULT_REGION


def _fixed(options: S3Options) -> ReadOnlyCredentials:
    from botocore.credentials import ReadOnlyCredentials

    return ReadOnlyCredentials(options.access_key_id, options.secret_access_key, options.session_token or None)


def _session(profile: str | None):  # type: ignore[no-untyped-def]
    from botocore.exceptions import ProfileNotFound
    from botocore.session import Session

    session = Session(profile=profile)
    try:
        session.get_scoped_config()
    except ProfileNotFound as error:
        raise ConfigError(f"s3: profile {profile!r} is not in the AWS configuration files") from error
    return session
