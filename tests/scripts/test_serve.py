"""The server: validation's probabilities, alone and together, and an answer to whatever else is sent to it."""

import base64
import dataclasses
import gc
import http.client
import io
import json
import random
import re
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.datastructures import Headers

from models import load_model
from scripts import serve
from scripts.common.heat_map import heat_map, overlay
from scripts.serving import app as application
from scripts.serving import guard
from scripts.serving.guard import HEADERS, Guard
from tests.helpers import file_of, png_that_says
from tests.scripts.reporting.browser import MISSING
from tests.test_structure import ROOT

PAGE = ROOT / "scripts" / "serving" / "page"
SECONDS = 20  # for an answer, at most


def encoded(seed=0, form="PNG", size=(8, 8), mode="L"):
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return file_of(Image.fromarray(pixels).convert(mode), form)


class Running:
    """A server in a thread of this process."""

    def __init__(self, run, *flags):
        line = [run, *flags, *"--device cpu --max-megabytes 0.2 --max-megapixels 0.5 --batch-size 8".split()]
        own = serve.build_parser().parse_args(line)
        self.service = serve.build_service(own)
        self.listener = serve.listening(own.host, 0)
        self.port = self.listener.getsockname()[1]
        self.server = serve.build_server(application.build_app(self.service, serve.allowed_names(own, own.host)))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()
        self.listener.close()

    def ask(self, path="/predict", body=None, **headers):
        """Status, headers and content of an answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)) as connection:
            connection.request("GET" if body is None else "POST", path, body, named)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def predict(self, body, query="", **headers):
        status, _, content = self.ask(f"/predict{query}", body, **headers)
        return status, json.loads(content)

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)

    def send(self, raw):
        """Send bytes as they are, close, and read what comes."""
        with self.connect() as connection:
            try:
                connection.sendall(raw)
                connection.shutdown(socket.SHUT_WR)
                return connection.recv(65_536)
            except (ConnectionResetError, BrokenPipeError):
                return b""


@pytest.fixture(scope="module")
def server(digits_run):
    with Running(digits_run) as running:
        yield running


def expected(run, body):
    network, classes, preprocessing = load_model(run)
    with torch.no_grad():
        return dict(zip(classes, network(preprocessing(Image.open(io.BytesIO(body)))[None])[0].softmax(0), strict=True))


def assert_same(answer, probabilities):
    for row in answer["top"]:
        assert row["probability"] == pytest.approx(float(probabilities[row["class"]]), abs=1e-6)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_probabilities_are_those_of_the_loaded_model(server, digits_run, form):
    body = encoded(form=form, size=(30, 20))
    status, answer = server.predict(body, "?top=10")
    assert status == 200 and len(answer["top"]) == 10 and (answer["width"], answer["height"]) == (30, 20)
    assert_same(answer, expected(digits_run, body))
    shares = [row["probability"] for row in answer["top"]]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1, abs=1e-5)
    assert (answer["class"], answer["probability"]) == (answer["top"][0]["class"], shares[0])


def test_requests_that_come_together_run_together_and_each_gets_its_own_answer(server, digits_run):
    bodies = [encoded(seed) for seed in range(24)]
    network = server.service.loaded.network
    with network.register_forward_hook(lambda *_: time.sleep(0.05)), ThreadPoolExecutor(24) as clients:
        answers = list(clients.map(server.predict, bodies))
    assert max(answer["batch"] for _, answer in answers) in range(2, 9), "at most --batch-size together"
    assert server.predict(bodies[0])[1]["batch"] == 1
    for body, (status, answer) in zip(bodies, answers, strict=True):
        assert status == 200
        assert_same(answer, expected(digits_run, body))


def test_an_images_pixels_are_let_go_while_its_request_waits_for_the_network(server):
    body = encoded(size=(301, 203), mode="RGB")
    alive = []

    def count(*_):
        images = (one for one in gc.get_objects() if issubclass(type(one), Image.Image))
        alive.append(sum(image.size == (301, 203) for image in images))

    with server.service.loaded.network.register_forward_hook(count):
        assert server.predict(body)[1]["width"] == 301
    assert alive == [0]


def test_a_failure_of_the_network_is_an_answer_and_the_next_request_works(server, capsys):
    with server.service.loaded.network.register_forward_hook(lambda *_: 1 / 0):
        status, headers, content = server.ask(body=encoded())
    assert status == 500 and "Traceback" not in content.decode() and headers.items() >= HEADERS.items()
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert server.predict(encoded())[0] == 200


def test_the_heat_map_is_two_pictures_of_what_the_network_sees(server):
    status, _, content = server.ask("/heat_map?class=3", encoded(size=(40, 20)))
    answer = json.loads(content)
    assert status == 200 and answer["class"] == "3"
    service = server.service
    image = service.loaded.preprocessing(Image.open(io.BytesIO(encoded(size=(40, 20)))))[None]
    heat = heat_map(service.loaded, image, [3])[0]
    pixels = service.loaded.preprocessing.evaluation_transform.to_pixels(image)[0]
    for name, expected in (("seen", overlay(pixels, 0 * heat)), ("heat", overlay(pixels, heat))):
        kind, _, content = answer[name].partition(",")
        assert kind == "data:image/png;base64"
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))).astype(int)
        each = len(shown) // expected.height  # enlarged for people
        assert np.abs(shown[each // 2 :: each, each // 2 :: each] - np.asarray(expected)).max() <= 2
    assert np.abs(heat - heat_map(service.loaded, image, [0])[0]).max() > 0.1, "classes have maps of their own"


def test_names_that_are_no_text_in_any_encoding_are_answered_like_others(server, monkeypatch):
    service = server.service
    names = tuple(f"caf\udce9 {number}" for number in range(10))  # folders named in Latin-1
    monkeypatch.setattr(service, "loaded", dataclasses.replace(service.loaded, classes=names))
    status, answer = server.predict(encoded())
    assert status == 200 and answer["class"] == names[answer["top"][0]["index"]]
    status, _, content = server.ask("/model")
    assert status == 200 and json.loads(content)["classes"] == list(names)


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")
def test_the_page_says_of_each_image_alone_why_it_has_no_heat_map(server, browser):
    script = """
        const send = window.fetch, pause = (ms) => new Promise((done) => setTimeout(done, ms));
        let status = 503;
        window.fetch = (path, rest) => String(path).startsWith("/heat_map")
            ? Promise.resolve(new Response('{"error": "busy", "class": "3", "seen": "data:,", "heat": "data:,"}', {status}))
            : send(path, rest);
        return (async () => {
            const said = [];
            for (status of [503, 200]) {
                await take(new File([Uint8Array.from(arguments[0])], "a.png", {type: "image/png"}));
                await pause(500);
                said.push(document.getElementById("hint").textContent);
            }
            return said;
        })();
    """
    browser.visit(f"http://127.0.0.1:{server.port}/")
    first, second = browser.run(script, list(encoded()))
    assert first == "No heat map: busy" and second.startswith("Click a class")


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")
def test_the_page_gives_height_and_width_of_what_the_network_sees(server, browser, monkeypatch):
    loaded = server.service.loaded
    shown = dataclasses.replace(loaded.preprocessing, val_image_size=(8, 12))
    monkeypatch.setattr(server.service, "loaded", dataclasses.replace(loaded, preprocessing=shown))
    browser.visit(f"http://127.0.0.1:{server.port}/")
    about = browser.run("return begin().then(() => document.getElementById('about').textContent);")
    assert "10 classes, 8 \u00d7 12 pixels, " in about


def test_the_page_says_what_is_served(server):
    status, _, content = server.ask("/model")
    about = json.loads(content)
    assert status == 200 and about["arch"] == "fc" and about["classes"] == [str(number) for number in range(10)]
    for path, text in (("/", b"<!doctype html>"), ("/page.css", b"body"), ("/page.js", b"fetch")):
        status, _, content = server.ask(path)
        assert status == 200 and text in content


NO_IMAGES = {
    "nothing": (b"", 400, "empty"),
    "text": (b"no image", 400, "not an image in a known format"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", 400, "known format"),
    "PPM": (b"P6 8 8 255 " + bytes(192), 400, "known format"),
    "cut": (encoded(size=(90, 90))[:-500], 400, "cannot be read: .*truncated"),
    "cut header": (encoded(form="WEBP", size=(90, 90))[:-20], 400, "cannot be read: "),
    "no known range": (encoded(form="TIFF", mode="F"), 400, "cannot be read: its levels, .* have no known range"),
    "bomb": (png_that_says(20_000, 20_000), 413, "bomb|pixels"),
    "many pixels": (png_that_says(1000, 501), 413, "1,000 x 501 pixels"),
    "many bytes": (bytes(200_001), 413, "more than 0.2 MB"),
}


@pytest.mark.parametrize("name", NO_IMAGES)
@pytest.mark.parametrize("path", ["/predict", "/heat_map"])
def test_what_is_no_image_or_too_large_is_refused_in_words(server, name, path, monkeypatch):
    body, code, text = NO_IMAGES[name]
    if name in ("bomb", "many pixels", "many bytes"):
        monkeypatch.setattr("scripts.serving.uploads.open_image", None)  # nothing is decoded
    status, _, content = server.ask(path, body)
    assert status == code and re.search(text, json.loads(content)["error"])


def test_an_announced_or_an_endless_body_is_refused_before_it_has_come(server):
    start = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
    with server.connect() as connection:
        connection.sendall(start + b"Content-Length: 99999999999\r\n\r\nabc")
        assert b" 413 " in connection.recv(4096)
    with server.connect() as connection:
        connection.sendall(
            start + b"Transfer-Encoding: chunked\r\n\r\n" + 3 * (b"%x\r\n" % 80_000 + bytes(80_000) + b"\r\n")
        )
        assert b" 413 " in connection.recv(4096)


def test_a_body_that_does_not_come_and_too_many_at_once_are_refused(server, monkeypatch):
    monkeypatch.setattr(application, "BODY_SECONDS", 0.1)
    with server.connect() as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
        assert b" 408 " in connection.recv(4096)
    monkeypatch.setattr(application, "MOST_AT_ONCE", 0)
    assert server.predict(encoded())[0] == 503


def test_headers_that_do_not_come_end_their_connection_and_no_other(server, monkeypatch):
    monkeypatch.setattr(guard, "HEADER_SECONDS", 1.0)
    body = encoded()
    begun = b"GET /model HTTP/1.1\r\nHost: localhost\r\n"
    silent, slow, second, patient = (server.connect() for _ in range(4))
    with silent, slow, second, patient:
        slow.sendall(begun)
        second.sendall(begun + b"\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += second.recv(65_536)
        assert b" 200 " in answer
        second.sendall(begun)
        patient.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body))
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < began + SECONDS / 2:
                slow.sendall(b"X-A: 1\r\n")
                time.sleep(0.1)
        assert time.monotonic() - began < SECONDS / 2, "a header from time to time keeps no connection"
        assert not silent.recv(10) and not second.recv(10)
        patient.sendall(body)  # a request in hand has its own limits
        assert b" 200 " in patient.recv(4096)


def form_of(*parts, boundary=b"b0undary", end=b"--\r\n"):
    """A form of (headers, content) parts."""
    return b"".join(b"--%s\r\n%s\r\n\r\n%s\r\n" % (boundary, *part) for part in parts) + b"--" + boundary + end


def disposition(name, file="x.png"):
    return f'Content-Disposition: form-data; name="{name}"{f"; filename={chr(34)}{file}{chr(34)}" if file else ""}'.encode()


def with_boundary(boundary):
    return {"content_type": f"multipart/form-data; boundary={boundary}"}


@pytest.mark.parametrize("name", ["image", "file", "upload", "files[]", ""])
def test_a_form_is_answered_as_its_file_is_whatever_the_field_is_called(server, name):
    body = encoded(form="JPEG", mode="RGB") + b"\r\n--b0undar\r\n\r\n"  # which is no end of the part
    of = with_boundary("b0undary")
    text = (disposition("comment", None), b"a cat")
    for form in (
        form_of((disposition(name), body)),
        form_of((disposition(name) + b"\r\nContent-Type: image/jpeg", body), text),
        form_of((disposition(name, None), body), end=b"--"),  # curl -F image=<x.jpg
    ):
        assert server.predict(form, **of) == server.predict(body)
    assert server.ask("/heat_map", form_of(text, (disposition(name), body)), **of)[0] == 200


GOOD = (disposition("image"), b"no image")
MALFORMED = {
    "no boundary": (form_of(GOOD), "", "names no boundary"),
    "a boundary that is too long": (form_of(GOOD, boundary=b"b" * 71), "b" * 71, "at most 70"),
    "another boundary": (form_of(GOOD), "other", "malformed"),
    "nothing": (b"", "b0undary", "malformed"),
    "cut in a file": (form_of(GOOD)[:-20], "b0undary", "cut off"),
    "no end": (form_of(GOOD, end=b""), "b0undary", "cut off"),
    "text before": (b"hello\r\n" + form_of(GOOD), "b0undary", "malformed"),
    "text after": (form_of(GOOD) + b"x" * 99, "b0undary", "malformed"),
    "no headers": (b"--b0undary\r\n\r\nno image\r\n--b0undary--\r\n", "b0undary", "malformed"),
    "endless headers": (form_of((b"X: " + b"y" * 5000, b"")), "b0undary", "malformed"),
    "two files": (form_of(GOOD, GOOD), "b0undary", "holds 2 files; send one image"),
    "no field": (b"--b0undary--\r\n", "b0undary", "no files"),
    "many fields": (form_of(*[(disposition("a", None), b"")] * 30), "b0undary", "malformed"),
    "no image": (form_of(GOOD), "b0undary", "not an image in a known format"),
    "an empty file": (form_of((disposition("image"), b"")), "b0undary", "empty; send an image file"),
    "a strange name": (form_of((b"Content-Disposition: form-data; filename*=x''%ff\xff", b"")), "b0undary", "empty"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_form_that_is_not_whole_or_holds_no_one_image_is_refused_in_a_line(server, name, capfd):
    body, boundary, text = MALFORMED[name]
    status, answer = server.predict(body, **with_boundary(boundary))
    assert status == 400 and text in answer["error"] and capfd.readouterr().err == ""


def test_a_form_may_be_as_large_as_its_file_and_a_little_more(server):
    whole = encoded(form="PNG", size=(8, 8))
    for size, status in ((200_000 - len(whole), 200), (200_001 - len(whole), 413), (300_000, 413)):
        form = form_of((disposition("image"), whole + bytes(size)))
        assert server.predict(form, **with_boundary("b0undary"))[0] == status


def test_a_form_of_nothing_but_boundaries_is_refused_at_once(server):
    began = time.monotonic()
    status, _ = server.predict(b"--a" + b"\r\n--a" * 39_000, **with_boundary("a"))
    assert status == 400 and time.monotonic() - began < SECONDS / 2


@pytest.mark.parametrize("query", ["?top=0", "?top=11", "?top=x", "?top=-1", "?top=%F0%9F%98%80", "?top=" + "9" * 5000])
def test_a_wrong_number_is_refused(server, query):
    status, answer = server.predict(encoded(), query)
    assert status == 400 and "top: must be a whole number from 1 to 10" in answer["error"]


def malformed(count):
    """Bytes that no client should send, of many kinds; the same for each call."""
    chance = random.Random(0)
    good = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    image = encoded(form="JPEG", size=(64, 64), mode="RGB")

    def noise(most):
        return chance.randbytes(chance.randrange(most))

    def broken_image():
        body = bytearray(image)
        for _ in range(chance.randrange(1, 60)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        return good % len(body) + body

    kinds = (  # beside the images, forms and bodies of the tests above
        lambda: noise(2000),
        lambda: good % (1 + chance.randrange(10**12)) + noise(100),
        broken_image,
        lambda: (
            chance.choice([b"PUT", b"DELETE", b"TRACE", b"\xff", b"GET"])
            + b" /predict HTTP/1.1\r\nHost: localhost\r\n\r\n"
        ),
        lambda: b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"../" * chance.randrange(40) + b"etc/passwd"),
        lambda: b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"y" * chance.randrange(60_000) + b"\r\n\r\n",
        lambda: b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + noise(300),
        lambda: b"POST /predict HTTP/%d.%d\r\nContent-Length: -5\r\n\r\n" % (chance.randrange(9), chance.randrange(9)),
    )
    return [chance.choice(kinds)() for _ in range(count)]


def test_malformed_requests_are_outlived(server, capfd):
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(server.send, malformed(110)))
    codes = {answer.split(b" ", 2)[1] for answer in answers if answer}
    # Who hangs up in the middle of a body may miss the answer, such as 413.
    assert codes >= {b"400", b"404", b"405"} and not codes & {b"500"}
    assert server.predict(encoded())[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_no_request_opens_a_file(server):
    opened = []
    watching = True

    def watch(event, arguments):
        if watching and event in ("open", "os.mkdir", "os.rename", "os.remove", "subprocess.Popen"):
            opened.append((event, arguments[0]))

    sys.addaudithook(watch)
    for _ in range(2):  # the first time, libraries import their parts
        opened.clear()
        for path in "/predict?name=/etc/passwd /../../etc/passwd /page/../serve.py /%2e%2e/%2e%2e/main.py /".split():
            server.ask(path, encoded(), content_disposition='form-data; filename="../../x.png"')
            server.ask(path)
    watching = False
    assert opened == []


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "attacker.example"}, 403),
        ({"Host": "["}, 403),
        ({"Origin": "https://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:80", "Origin": "http://localhost:80"}, 200),
    ],
)
def test_what_another_web_page_sends_is_refused_and_every_answer_has_the_headers(server, headers, code):
    status, got, _ = server.ask("/model", **headers)
    assert status == code and got.items() >= HEADERS.items()
    assert server.ask("/nothing")[1].items() >= HEADERS.items()


def test_the_page_loads_nothing_from_elsewhere():
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    text = "".join(path.read_text() for path in PAGE.iterdir())
    assert set(re.findall(r"https?://[^\s\"'`<]+", text)) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(| style=| on\w+=\"", text)


def test_a_name_that_only_points_here_is_refused_wherever_the_server_listens(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Ape.lab")

    def problem(line, address, host):
        rules = Guard(None, serve.allowed_names(serve.build_parser().parse_args(["run", *line]), address))
        return rules._problem(Headers({"host": host, "origin": f"http://{host}"}))

    everywhere = (["--host", "0.0.0.0"], "0.0.0.0")
    proxied = (["--allow-name", "Demo.example"], "127.0.0.1")
    for line, address in (([], "127.0.0.1"), everywhere, proxied):
        assert "--allow-name" in problem(line, address, "attacker.example:8000")
        for host in ("127.0.0.1:8000", "[::1]:8000", "localhost", "192.168.1.7:8000"):
            assert problem(line, address, host) is None
    for host in ("ape.lab", "ape.local:8000", "APE"):
        assert problem(*everywhere, host) is None and problem([], "127.0.0.1", host)
    assert problem(*proxied, "demo.example") is None
    assert problem(["--host", "My.Machine"], "127.0.1.1", "my.machine") is None
    assert serve.is_loopback("::1") and not serve.is_loopback("fe80::1%eth0")
