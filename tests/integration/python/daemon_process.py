# Starts and stops expertd processes for integration tests.

import os
import pathlib
import selectors
import signal
import subprocess
import time

DEADLINE = 30  # Seconds, for a daemon to listen.


def program(name):
    """The path of a program of this build."""
    return pathlib.Path(os.environ["EXPERTD_BIN_DIR"]) / name


class DaemonProcess:
    """One CPU daemon on ports that the kernel picks; `address` is its "host:port"."""

    def __init__(self, slot, log_dir):
        self._log = log_dir / f"slot{slot}.log"
        command = [program("expertd"), "--listen", "127.0.0.1:0", "--probe_listen", "127.0.0.1:0"]
        command += ["--slot", str(slot), "--device", "cpu", "--cpu_threads", "1"]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        try:
            self.address = self._read_address()
        except BaseException:
            self._process.kill()
            self.stop()
            raise

    def _read_address(self):
        """Waits for the line "listening address=HOST:PORT ..." on stdout."""
        end = time.monotonic() + DEADLINE
        text = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while time.monotonic() < end:
                if not selector.select(timeout=max(0, end - time.monotonic())):
                    continue
                piece = os.read(self._process.stdout.fileno(), 4096)
                text += piece
                for line in text.split(b"\n")[:-1]:
                    if line.startswith(b"listening "):
                        fields = dict(f.split(b"=", 1) for f in line.split() if b"=" in f)
                        return fields[b"address"].decode()
                if not piece:
                    break
        raise RuntimeError(f"the daemon did not listen:\n{self.log_tail()}")

    def log_tail(self):
        return self._log.read_text(errors="replace")[-2000:]

    def stop(self):
        """SIGTERM, a bounded wait, SIGKILL; returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        return self._process.returncode


class Fleet:
    """Daemons of slots 0..count-1; use as a context manager."""

    def __init__(self, count, log_dir):
        self.daemons = []
        try:
            for slot in range(count):
                self.daemons.append(DaemonProcess(slot, log_dir))
        except BaseException:
            self.stop()
            raise

    @property
    def addresses(self):
        return [daemon.address for daemon in self.daemons]

    def stop(self):
        return [daemon.stop() for daemon in self.daemons]

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.stop()
