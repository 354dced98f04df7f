"""A service in a process of its own, for tests that stop, kill and ask it: JSON in, JSON out.

python served.py SETTINGS      each line of standard input is a question, answered on one line
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from tlcache.daemon.service import Service


def main() -> None:
    logging.basicConfig(stream=sys.stderr, level="INFO", format="%(asctime)s %(message)s")
    given = json.loads(sys.argv[1])
    settings = SimpleNamespace(
        **{"max_size": None, "max_age": None, "keep_free": None, "interval": 0.5, **given}
    )
    settings.roots = [Path(one) for one in given["roots"]]
    settings.history = Path(given["history"])
    if "uid" in given:
        # The interpreter's own files may be closed to that user: what is imported late comes now.
        for module in ("binary", "params", "mapped", "trash", "evictions"):
            importlib.import_module(f"tlcache.store.{module}")
        importlib.import_module("filelock")
        os.setgroups([])
        os.setresgid(*[given["uid"]] * 3)
        os.setresuid(*[given["uid"]] * 3)
    service = Service(settings)
    service.start()
    print(json.dumps(service.ready(60)), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(service, line.split())), flush=True)
    service.stop()


def _answer(service: Service, question: list[str]) -> object:
    what, *arguments = question
    if what == "index":
        return {one.place.location: one.bytes for one in service.index.entries()}
    if what == "stats":
        return service.stats()
    if what == "health":
        return service.health()
    if what == "events":
        return service.events.recent()
    if what == "count":
        service.history.count(arguments[0])
        return True
    raise ValueError(what)


if __name__ == "__main__":
    main()
