"""At the node of site north: the clock is a minute ahead."""

import sys

if sys.orig_argv[-2:] == ["--home", "north"]:
    import datetime

    class Ahead(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(seconds=60)

    datetime.datetime = Ahead
