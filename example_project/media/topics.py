"""What can happen to an item, and what follows from it. A topic that does not stand here cannot be staged."""

from __future__ import annotations

from outbox import Topic

REQUESTED = Topic("media.requested", required=True, description="somebody wishes for an item")
APPROVED = Topic("media.approved", required=True, description="the wish is granted")
DOWNLOAD_STARTED = Topic("media.download_started", required=True)
DOWNLOAD_FAILED = Topic("media.download_failed", required=True)
DOWNLOAD_FINISHED = Topic("media.download_finished", required=True, description="the item is in the library")
MOVED = Topic("media.moved", required=True, description="its file lies elsewhere now")
RENAMED = Topic("media.renamed", required=True)
RATED = Topic("media.rated", required=True)
WATCHED = Topic("media.watched", required=True)
SCANNED = Topic("media.scanned", required=True, description="its file was looked at again")
REMOVED = Topic("media.removed", required=True)

EVENTS = (
    REQUESTED,
    APPROVED,
    DOWNLOAD_STARTED,
    DOWNLOAD_FAILED,
    DOWNLOAD_FINISHED,
    MOVED,
    RENAMED,
    RATED,
    WATCHED,
    SCANNED,
    REMOVED,
)

# What follows from a finished download, apart from telling those who listen.
NOTIFICATION = Topic("media.notification", required=True, description="tell who wished for it")
MODULE = Topic("media.module", required=True, description="let the media server scan its folder")
SUBTITLE = Topic("media.subtitle", required=True, description="look for subtitles")

EFFECTS = (NOTIFICATION, MODULE, SUBTITLE)
