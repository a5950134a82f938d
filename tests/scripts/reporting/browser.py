"""A headless Chromium, driven through chromedriver's own HTTP interface (W3C WebDriver), without a package for it."""

import json
import re
import shutil
import subprocess
import urllib.request

MISSING = ", ".join(name for name in ("chromium", "chromedriver") if shutil.which(name) is None)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's reference, from the standard
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]


class Browser:
    """A context: one browser with one page."""

    def __enter__(self):
        line = ["chromedriver", "--port=0"]
        self.driver = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        port = next(
            found[1]
            for found in map(re.compile(r"started successfully on port (\d+)").search, self.driver.stdout)
            if found
        )
        self.url = f"http://127.0.0.1:{port}/session"
        wanted = {"goog:chromeOptions": {"args": FLAGS}, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._send("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self.url += f"/{made['sessionId']}"
        return self

    def __exit__(self, *_):
        try:
            self._send("DELETE", "")
        finally:
            self.driver.kill()
            self.driver.wait()
            self.driver.stdout.close()

    def _send(self, method, path, content=None):
        body = json.dumps(content if content is not None else {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"}, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]

    def cdp(self, command, **parameters):
        """A command of the DevTools protocol."""
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, path, width=1440, height=900, dark=False):
        """Open a file in a window of this size."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme, {"name": "prefers-reduced-motion", "value": "reduce"}])
        self.visit(path.resolve().as_uri())

    def visit(self, address):
        """Open a page."""
        self._send("POST", "/url", {"url": address})

    def run(self, script, *arguments):
        """Result of a JavaScript function body."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector):
        """A click of the mouse on the first element, which must be visible and not be covered."""
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", f"/element/{found[ELEMENT]}/click", {})

    def press(self, selector, key):
        """A key, given as WebDriver's code point, on the first element."""
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", f"/element/{found[ELEMENT]}/value", {"text": key})

    def messages(self):
        """Messages of the console since the last call."""
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]
