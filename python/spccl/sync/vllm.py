"""Weight sync for vLLM 0.29 and later: the trainer's client, and the entry point that gives vLLM its engine.

    vllm serve MODEL --weight-transfer-config '{"backend": "spccl"}'            # with VLLM_SERVER_DEV_MODE=1
    client = spccl.sync.VllmClient("http://host:8000", "/shared/run1")          # trainer
    client.update(push.publish())

Neither needs vLLM to be imported by the trainer. docs/SYNC.md says what runs in which order.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from spccl.errors import ArgumentError, Error, PeerError, StateError, TimeoutError

from ._replica import BROKEN, INTACT, OPEN

BACKEND = "spccl"
MOST_ERROR_CHARS = 2000


def register() -> None:
    """Give vLLM the engine "spccl". Entry point of `vllm.general_plugins`: vLLM calls it in each of its processes."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError as error:
        logging.getLogger(__name__).warning("spccl: no weight transfer in this vLLM, 0.29 or later has it: %s", error)
        return
    if BACKEND not in WeightTransferEngineFactory._registry:  # a second registration would raise
        WeightTransferEngineFactory.register_engine(BACKEND, "spccl.sync._vllm_engine", "SpcclWeightTransferEngine")


class VllmClient:
    """Tells a vLLM server which version of a folder to take. The server reads the folder itself.

        client = spccl.sync.VllmClient("http://host:8000", "/shared/run1")
        client.update(7)

    The server needs VLLM_SERVER_DEV_MODE=1: these routes are for a trusted network.

    Args:
        url: of the server.
        folder: of the publisher, as the server sees it. None: what the server was started with,
            `--additional-config '{"spccl": {"folder": ...}}'`; then it takes no other.
        timeout_s: the most time of one request. A request that is late may still be carried out.
        pause: what becomes of running requests: "keep" (they go on with the new weights), "wait" or "abort".
    """

    def __init__(self, url: str, folder: str | Path | None = None, *, timeout_s: float = 300.0, pause: str = "keep"):
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ArgumentError(f"vllm client: {url!r}: wanted http://host:port")
        if pause not in ("keep", "wait", "abort") or not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ArgumentError(
                f"vllm client: pause={pause!r}, timeout_s={timeout_s}: wanted keep, wait or abort, and a time above 0"
            )
        self.url, self.timeout_s, self.pause = url.rstrip("/"), timeout_s, pause
        self.folder = None if folder is None else str(folder)
        self.pause_s = 0.0  # of the last update: from before /pause to after /resume

    def update(self, version: int) -> int:
        """Put a version into the server's weights: all of its workers take it, or none. Returns the version.

        init, pause, start, update, finish, resume. If the workers could not take it but hold what they held, the
        server goes on with that.
        Raises: StateError with the server's text; PeerError if it does not answer; TimeoutError. Where the text does
            not say that the server goes on, it is paused, because its weights may be a mixture: update again, or start
            it again.
        """
        version = _checked(version)
        self.open()
        start = time.perf_counter()
        self._post("pause", query={"mode": self.pause})
        try:
            self._update(version)
        except Error as error:
            if INTACT not in str(error):
                what = "start it again" if BROKEN in str(error) else "update again, or start it again"
                raise type(error)(f"{error}; {self.url} stays paused: {what}") from error
            self._post("resume")
            raise StateError(f"{error}; {self.url} serves on") from error
        except BaseException as error:  # KeyboardInterrupt: whether the workers have written is not known
            error.add_note(f"vllm client: {self.url} stays paused: update again, or start it again")
            raise
        self._post("resume")
        self.pause_s = time.perf_counter() - start
        return version

    def _update(self, version: int) -> None:
        self._session(self._info(version, "update"), str(version))
        found = self.version()
        if found != str(version):
            raise StateError(f"vllm client: {self.url}/weight_info says version {found!r}, wanted {version}")

    def _session(self, update_info: dict[str, Any], weight_version: str | None) -> None:
        self._post("start_weight_update")
        try:
            self._post("update_weights", {"update_info": update_info})
        except BaseException:  # KeyboardInterrupt too: a second one ends the wait for the server
            self._finish()
            raise
        self._post("finish_weight_update", {} if weight_version is None else {"weight_version": weight_version})

    def _finish(self) -> None:
        """Close the sessions of a failed update. The worker that reported its error has none, and complains."""
        with contextlib.suppress(Error):
            self._post("finish_weight_update")

    def stage(self, version: int) -> None:
        """Let the server begin to read and check a version while it serves; returns at once. `update` then waits less.

        Raises: as `update`. An error of reading is that of `update`.
        """
        version = _checked(version)
        self.open()
        self._session(self._info(version, "stage"), None)

    def open(self) -> None:
        """Let the server open the folder, if it has another one or none: it compares its weights with its checkpoint.

        `update` and `stage` do it too; before the first one it takes the time to read the checkpoint twice.
        Raises: as `update`.
        """
        world_size = self._get("get_world_size").get("world_size")
        info = {"folder": self.folder, "timeout_s": self._most_s, "world_size": world_size}
        try:
            self._post("init_weight_transfer_engine", {"init_info": info})
        except StateError as error:
            if OPEN not in str(error):
                raise
            self._finish()  # of a client that ended before its own

    def version(self) -> str:
        """The version that the server says it has; "default" before the first one."""
        return str(self._get("weight_info").get("weight_version"))

    @property
    def _most_s(self) -> float:
        """The server's own deadline: it ends before the request's, so that its error arrives."""
        return 0.9 * self.timeout_s

    def _info(self, version: int, action: str) -> dict[str, Any]:
        return {"version": version, "action": action, "timeout_s": self._most_s}

    def _get(self, route: str) -> dict[str, Any]:
        text = self._send("GET", route)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise PeerError(f"vllm client: {self.url}/{route}: answered {text[:80]!r}: is it a vLLM server?")
        return found

    def _post(self, route: str, body: dict[str, Any] | None = None, query: dict[str, str] | None = None) -> str:
        return self._send("POST", route, body, query)

    def _send(
        self, method: str, route: str, body: dict[str, Any] | None = None, query: dict[str, str] | None = None
    ) -> str:
        where = f"{self.url}/{route}"
        asked = urllib.request.Request(
            where + ("?" + urllib.parse.urlencode(query) if query else ""),
            data=None if method == "GET" else json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(asked, timeout=self.timeout_s) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            raise _refused(where, error) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, OSError) and "timed out" in str(reason):
                raise TimeoutError(f"vllm client: {where}: no answer within {self.timeout_s:g} s") from error
            raise PeerError(f"vllm client: {where}: {reason}: is the server up, and the address right?") from error


def _checked(version: int) -> int:
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ArgumentError(f"vllm client: version={version!r}: wanted what publish() returned")
    return version


def _refused(where: str, error: urllib.error.HTTPError) -> StateError:
    """An answer that is no success, with the server's text."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as failure:  # a text that does not arrive, or only in part
        text = f"{error.reason}; the server's text did not arrive: {failure}"
    try:
        found = json.loads(text)
        found = found.get("error", found.get("detail", found))
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        pass
    hint = ": the server needs VLLM_SERVER_DEV_MODE=1" if error.code == 404 else ""
    if "not configured" in text:
        hint = """: start it with --weight-transfer-config '{"backend": "spccl"}'"""
    if len(text) > MOST_ERROR_CHARS:
        text = text[:MOST_ERROR_CHARS] + "..." + (f" {INTACT}" if INTACT in text[MOST_ERROR_CHARS:] else "")
    return StateError(f"vllm client: {where}: status {error.code}: {text}{hint}")
