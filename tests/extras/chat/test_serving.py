"""The server answers as OpenAI's API does, refuses what it can't do, and ends in order."""

import http.client
import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from lockstep_gpt import cli
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.chat.answering import Answer, stream
from lockstep_gpt.extras.chat.sampling import Sampling
from lockstep_gpt.extras.chat.speech import Speech
from lockstep_gpt.extras.chat.template import template_of
from lockstep_gpt.run.checkpoint import find_checkpoint
from lockstep_gpt.run.trained_model import load_model

ROOT = Path(__file__).parents[3]
for name in ("starlette", "uvicorn"):
    pytest.importorskip(name)
needs_openai = pytest.mark.skipif(
    importlib.util.find_spec("openai") is None, reason="the library openai is not installed"
)
ENDLESS = {"temperature": 0, "seed": None}  # for the base run, whose likeliest answer has no end
ASK = {"messages": [{"role": "user", "content": "hi"}], "seed": 3, "max_tokens": 20}


class Server:
    """A running server, in a process of its own."""

    def __init__(self, python, run, *words, program=("-m", "lockstep_gpt")):
        start = [python, *program, "serve", str(run), "--port", "0"]
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen([*start, *words], text=True, **both)
        self.printed = []
        while not (self.printed and self.printed[-1].startswith("ready: ")):
            self.printed.append(self.process.stdout.readline())
            assert self.printed[-1], self.printed
        self.url = self.printed[-1].split()[1]
        self.port = int(self.url.rpartition(":")[2])

    def ask(self, path, body=None, **headers):
        """Send one request; return status, headers, and content: JSON, or the events."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("GET" if body is None else "POST", path, content, names)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        if response.headers["content-type"].startswith("text/event-stream"):
            *events, done, rest = text.split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            return response.status, response.headers, [json.loads(event[6:]) for event in events]
        is_json = response.headers["content-type"] == "application/json"
        return response.status, response.headers, json.loads(text) if is_json else text

    def chat(self, **changes):
        return self.ask("/v1/chat/completions", {**ASK, **changes})

    def complete(self, **changes):
        return self.ask("/v1/completions", {"prompt": "def f(", "seed": 3, **changes})

    def counts(self):
        health = self.ask("/health")[2]
        return health["answering"], health["waiting"]

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        rest = self.process.communicate(timeout=60)[0]
        return self.process.returncode, rest


@pytest.fixture(scope="module")
def chat_run(saved_run):
    return saved_run(ByteTokenizer(), source="chat", path="conversations.jsonl")


@pytest.fixture(scope="module")
def endless_chat_run(saved_run):
    """A model whose answers hardly ever end by themselves."""
    tokenizer = ByteTokenizer()
    stops = template_of(tokenizer).stop
    return saved_run(tokenizer, never=stops, source="chat", path="conversations.jsonl")


@pytest.fixture(scope="module")
def base_run(saved_run):
    return saved_run(ByteTokenizer(), never=[0], source="stdlib")


@pytest.fixture
def started(python_of_forks):
    """Start servers, and end them."""
    servers = []

    def start(run, *words):
        servers.append(Server(python_of_forks, run, *words))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.communicate()


@pytest.fixture(scope="module")
def server(chat_run, python_of_forks):
    server = Server(python_of_forks, chat_run, "--body", "20000")
    yield server
    assert server.counts() == (0, 0)  # no test left something behind
    status, rest = server.end()
    assert (status, rest) == (0, "stopped\n")


@pytest.fixture(scope="module")
def expected(chat_run):
    """Return the answer to ids, computed in this process."""
    model, _, tokenizer = load_model(find_checkpoint(chat_run))

    template = template_of(tokenizer)

    def text(prompt, length=20, stops=template.stop, **sampling):
        chosen = Sampling(**{"temperature": 1.0, "seed": 3, **sampling})
        answer = Answer(prompt, length, Speech(tokenizer), chosen, stops)
        return "".join(stream(model, answer)), answer

    text.template = template
    return text


def error_of(answer, status, code=None):
    actual_status, headers, content = answer
    assert (actual_status, set(content)) == (status, {"error"})
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert content["error"]["code"] == code
    assert "\n" not in content["error"]["message"]
    assert headers["content-type"] == "application/json"
    return content["error"]["message"]


def test_a_chat_is_answered_with_the_model_s_own_text(server, expected):
    prompt = expected.template.render(ASK["messages"], reply=True)
    text, answer = expected(prompt)
    status, _, content = server.chat()
    assert (status, content["object"], content["model"]) == (
        200,
        "chat.completion",
        content["model"],
    )
    (choice,) = content["choices"]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == answer.reason
    count = len(answer.ids)
    numbers = {"prompt_tokens": len(prompt), "completion_tokens": count}
    assert content["usage"] == {**numbers, "total_tokens": len(prompt) + count}


def test_a_stream_has_the_same_text_in_whole_characters_and_then_the_usage(server, expected):
    text, answer = expected(expected.template.render(ASK["messages"], reply=True))
    _, headers, events = server.chat(stream=True, stream_options={"include_usage": True})
    assert headers["cache-control"] == "no-store"
    *parts, last, usage = events
    deltas = [event["choices"][0]["delta"] for event in parts]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(event.get("content", "") for event in deltas) == text
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": answer.reason,
    }
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(answer.ids))
    assert {event["id"] for event in events} == {usage["id"]}


def test_a_prompt_is_completed_as_text_or_as_ids(server, expected):
    text, _ = expected([*b"def f("], 16, {0})
    for prompt in ("def f(", ["def f("], [*b"def f("], [[*b"def f("]]):
        assert server.complete(prompt=prompt)[2]["choices"][0]["text"] == text
    *events, usage = server.complete(stream=True, stream_options={"include_usage": True})[2]
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert {event["object"] for event in (*events, usage)} == {"text_completion"}


def test_sampling_and_stop_sequences_are_obeyed(server, expected):
    for settings in ({"temperature": 0}, {"top_k": 2}, {"top_p": 0.3}, {"seed": 4}):
        text, _ = expected([*b"def f("], 16, {0}, **settings)
        assert server.complete(**settings)[2]["choices"][0]["text"] == text
    text, _ = expected([*b"def f("], 16, {0})
    choice = server.complete(stop=[text[5:7], "never"])[2]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.find(text[5:7])], "stop")
    one, other = (server.complete(seed=None)[2]["choices"][0]["text"] for _ in range(2))
    assert one != other


def test_markers_in_a_prompt_stay_text(server):
    message = {"role": "user", "content": "<|end|><|assistant|>"}
    usage = server.chat(messages=[message], max_tokens=1)[2]["usage"]
    assert usage["prompt_tokens"] == 3 + len("<|end|><|assistant|>")
    usage = server.complete(prompt="<|endoftext|>", max_tokens=1)[2]["usage"]
    assert usage["prompt_tokens"] == len("<|endoftext|>")


def test_messages_may_have_the_forms_that_clients_send(server):
    same = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "user", "content": "hi", "refusal": None, "tool_calls": None},
    ]
    text = server.chat()[2]["choices"][0]["message"]["content"]
    for message in same:
        assert server.chat(messages=[message])[2]["choices"][0]["message"]["content"] == text
    neutral = {"n": 1, "presence_penalty": 0, "tools": None, "user": "me", "logprobs": False}
    assert server.chat(**neutral)[2]["choices"][0]["message"]["content"] == text
    developer, system = (
        server.chat(messages=[{"role": role, "content": "x"}, *ASK["messages"]])[2]["choices"]
        for role in ("developer", "system")
    )
    assert developer == system


def test_a_conversation_beyond_the_context_is_refused_or_cut_and_says_so(server):
    messages = [
        {"role": "system", "content": "sys"},
        *(
            {"role": role, "content": f"{number} {role}"}
            for number in range(9)
            for role in ("user", "assistant")
        ),
        {"role": "user", "content": "last"},
    ]
    message = error_of(server.chat(messages=messages), 400, "context_length_exceeded")
    assert "the context is 64" in message
    assert "truncation to auto" in message
    status, _, content = server.chat(messages=messages, truncation="auto")
    assert status == 200
    assert 0 < content["left_out"] < 19
    shortened = [messages[0], *messages[1 + content["left_out"] :]]
    assert shortened[1]["role"] == "user"
    unstreamed = server.chat(messages=shortened)[2]
    assert unstreamed["usage"] == content["usage"]
    assert unstreamed["choices"] == content["choices"]
    alone = [{"role": "user", "content": 99 * "x"}]
    message = error_of(server.chat(messages=alone, truncation="auto"), 400)
    assert message.startswith("the newest message has 102 tokens")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": None}, "messages must be a list"),
        ({"messages": ["hi"]}, "messages[0] must be an object"),
        ({"messages": [{"role": "king", "content": "x"}]}, "role 'king' is not one of"),
        ({"messages": [{"role": "user"}]}, "messages[0] must have a role, and a content"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0] must have a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0] must"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name is not"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "a text contains a NUL byte"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1 to 64"),
        ({"max_tokens": 65}, "max_tokens must be an integer from 1 to 64"),
        ({"max_tokens": True}, "max_tokens must be an integer"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens must be an integer"),
        ({"temperature": -1}, "temperature must be a number from 0 to 2"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": 1e400}, "the body is not JSON (Infinity is not a JSON number)"),
        ({"top_p": 0}, "top_p=0 must be above 0"),
        ({"top_k": 0}, "top_k must be an integer from 1"),
        ({"seed": 2**63}, "seed must be an integer from 0"),
        ({"stop": ["a"] * 5}, "stop must be up to 4 texts"),
        ({"stop": ""}, "stop must be up to 4 texts"),
        ({"stream": 1}, "stream must be false or true"),
        ({"stream_options": {"include_usage": True}}, "stream_options must be an object, and"),
        ({"n": 2}, "n is not supported; leave it out"),
        ({"tools": [{}]}, "tools is not supported"),
        ({"truncation": "yes"}, 'truncation must be "disabled" or "auto"'),
        ({"max_token": 5}, "max_token is not a parameter that this server knows"),
    ],
)
def test_a_parameter_that_cannot_be_is_refused_by_its_name(server, changes, message):
    assert error_of(server.chat(**changes), 400).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": ["a", "b"]}, "prompt must be one text, or one list"),
        ({"prompt": [256]}, "prompt has ids that are not from 0 to 255"),
        ({"prompt": [True]}, "prompt must be one text"),
        ({"prompt": None}, "prompt must be one text"),
        ({"messages": []}, "messages is not a parameter"),
        ({"echo": True}, "echo is not supported"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(server, changes, message):
    assert error_of(server.complete(**changes), 400).startswith(message)


def test_a_prompt_of_all_the_context_is_refused(server):
    assert server.complete(prompt=63 * "x", max_tokens=1)[0] == 200
    message = error_of(server.complete(prompt=64 * "x"), 400, "context_length_exceeded")
    assert message.startswith("prompt has 64 tokens, and the context is 64")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"prompt": NaN}', b"[" * 9000, b"9" * 5000]
)
def test_a_body_that_is_no_json_object_is_refused(server, body):
    assert error_of(server.ask("/v1/completions", body), 400).startswith("the body is not")


def test_text_that_is_no_unicode_neither_fails_nor_comes_back_broken(server):
    assert server.complete(prompt="\ud800")[0] == 200
    assert error_of(server.complete(**{"\ud800": 1}), 400).startswith("\ud800 is not a parameter")


def test_a_body_beyond_the_limit_is_refused_however_it_is_sent(server):
    body = json.dumps({"prompt": "x" * 20000}).encode()
    assert "more than 20000 bytes" in error_of(server.ask("/v1/completions", body), 413)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as line:
        line.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        line.sendall(b"".join(b"1000\r\n" + b"x" * 4096 + b"\r\n" for _ in range(5)))
        assert line.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_unknown_paths_methods_and_models_are_named(server):
    assert "Not Found" in error_of(server.ask("/v2"), 404)
    assert "Method Not Allowed" in error_of(server.ask("/v1/completions"), 405)
    message = error_of(server.chat(model="gpt-4"), 404, "model_not_found")
    (model,) = server.ask("/v1/models")[2]["data"]
    assert message == f"model 'gpt-4' is not {model['id']}"
    assert server.ask(f"/v1/models/{model['id']}")[2] == model
    error_of(server.ask("/v1/models/other"), 404, "model_not_found")
    assert server.chat(model=model["id"])[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", ""]
)
def test_a_name_that_is_not_its_own_is_refused(server, host):
    assert "--allow-host" in error_of(server.ask("/health", Host=host), 403)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:80", "10.0.0.1"]
)
def test_its_own_names_and_addresses_are_accepted(server, host):
    assert server.ask("/health", Host=host)[0] == 200


def test_other_pages_may_neither_ask_nor_read(server):
    for origin in (
        "http://evil.example",
        "null",
        "http://[",
        "x",
        f"http://127.0.0.1:{server.port + 1}",
    ):
        assert "may not use" in error_of(server.ask("/health", Origin=origin), 403)
    status, headers, _ = server.ask("/health", Origin=server.url)
    assert status == 200
    assert not [name for name in headers if name.lower().startswith("access-control")]


@needs_openai
def test_the_official_client_chats_completes_and_streams(server, expected):
    from openai import BadRequestError, OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        (model,) = client.models.list().data
        text, _ = expected(expected.template.render(ASK["messages"], reply=True))
        answer = client.chat.completions.create(model=model.id, **ASK)
        assert answer.choices[0].message.content == text
        history = [*ASK["messages"], answer.choices[0].message, {"role": "user", "content": "?"}]
        again = client.chat.completions.create(model=model.id, messages=history, max_tokens=3)
        assert again.usage.completion_tokens <= 3
        parts = list(client.chat.completions.create(model=model.id, stream=True, **ASK))
        assert "".join(event.choices[0].delta.content or "" for event in parts) == text
        assert parts[-1].choices[0].finish_reason == answer.choices[0].finish_reason
        rest = {"prompt": "def f(", "seed": 3, "max_tokens": 9}
        unstreamed = client.completions.create(model=model.id, **rest)
        parts = client.completions.create(model=model.id, stream=True, **rest)
        assert "".join(event.choices[0].text for event in parts) == unstreamed.choices[0].text
        with pytest.raises(BadRequestError, match="max_tokens must be") as caught:
            client.chat.completions.create(model=model.id, messages=history, max_tokens=999)
        assert caught.value.param == "max_tokens"


@needs_openai
def test_the_code_of_the_page_of_documentation_runs(started, endless_chat_run, capsys):
    page = ROOT / "docs/chat.md"
    if not page.is_file():
        pytest.skip("no docs/chat.md here")
    server = started(endless_chat_run, "--longest", "20")
    text = page.read_text("utf-8")
    _, code = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(code.replace("http://127.0.0.1:8000", server.url), "chat.md", "exec"), {})
    assert capsys.readouterr().out


def test_a_base_model_only_completes_and_says_why(started, base_run):
    server = started(base_run)
    assert server.printed[0].startswith(
        "only /v1/completions: this model was trained on data=stdlib"
    )
    assert "use generate" in error_of(server.chat(), 400, "no_chat_template")
    assert server.complete()[0] == 200


def test_beyond_the_limit_requests_wait_and_then_are_refused(started, base_run):
    server = started(base_run, "--parallel", "2", "--waiting", "1", "--longest", "9000")
    with ThreadPoolExecutor(4) as pool:

        def ask(length):
            return pool.submit(server.complete, **ENDLESS, max_tokens=length)

        first, second = ask(1500), ask(1500)
        wait_until(lambda: server.counts() == (2, 0))
        third = ask(5)
        wait_until(lambda: server.counts() == (2, 1))
        _, headers, content = refused = server.complete()
        assert "2 requests are being answered and 1 wait" in error_of(
            refused, 429, "rate_limit_exceeded"
        )
        assert content["error"]["type"] == "rate_limit_error"
        assert 1 <= int(headers["retry-after"]) <= 60
        answers = [future.result() for future in (first, second, third)]
    assert [answer[0] for answer in answers] == [200] * 3
    lengths = [answer[2]["usage"]["completion_tokens"] for answer in answers]
    assert lengths == [1500, 1500, 5]


def test_streams_advance_together(started, base_run):
    server, arrived = started(base_run, "--longest", "9000"), []

    def read(name):
        with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
            body = {"prompt": name, **ENDLESS, "max_tokens": 1000, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body))
            with connection.getresponse() as lines:
                arrived.extend(name for line in lines if line.startswith(b"data: {"))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(read, "ab"))
    # Not how often they alternate: on a loaded machine, a thread reads many lines at once.
    half = Counter(arrived[: len(arrived) // 2])
    assert min(half["a"], half["b"]) > 100


def test_a_client_that_leaves_frees_its_place(started, base_run):
    server = started(base_run, "--parallel", "1", "--longest", "100000")
    body = json.dumps({"prompt": "x", **ENDLESS, "max_tokens": 100000})
    for streamed in (False, True):
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        text = json.dumps({**json.loads(body), "stream": streamed})
        connection.request("POST", "/v1/completions", text)
        wait_until(lambda: server.counts() == (1, 0))
        if streamed:
            assert connection.getresponse().readline().startswith(b"data: ")
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        wait_until(lambda: server.counts() == (0, 0))
    assert server.complete()[0] == 200


def test_a_client_that_leaves_within_its_body_leaves_no_trace(started, base_run):
    server = started(base_run)
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
        line.sendall(head + b'{"prompt": ')
    assert server.complete()[0] == 200
    assert server.end() == (0, "stopped\n")


# Limits on clients are a second, and the system holds little of what they don't read.
HURRIED = """
import socket, sys
from lockstep_gpt import cli
from lockstep_gpt.extras.chat import connections, serving
connections.CLIENT_SECONDS = 1
def hurried_listener(*place, opened=serving.open_listener):
    listener = opened(*place)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener
serving.open_listener = hurried_listener
sys.exit(cli.main(sys.argv[1:]))
"""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def hurried(base_run, python_of_forks):
    words = ("--longest", "1000000", "--seconds", "3")
    server = Server(python_of_forks, base_run, *words, program=("-c", HURRIED))
    yield server
    assert server.counts() == (0, 0)
    assert server.end() == (0, "stopped\n")


def ended(line):
    """Return what a connection received, once the server has ended it."""
    line.settimeout(60)
    received = bytearray()
    try:
        while part := line.recv(65536):
            received += part
    except ConnectionError:
        pass
    return bytes(received)


def drip(lines, seconds):
    """Send a byte on each connection every so often; return how many still accept one."""
    end, lines = time.monotonic() + seconds, set(lines)
    while lines and time.monotonic() < end:
        for line in list(lines):
            try:
                line.send(b"x")
            except OSError:
                lines.discard(line)
        time.sleep(0.1)
    return len(lines)


def test_two_hundred_clients_that_never_finish_a_request_neither_block_nor_stay(hurried):
    lines = [socket.create_connection(("127.0.0.1", hurried.port)) for _ in range(200)]
    for number, line in enumerate(lines):
        line.sendall((b"GET /health HTTP/1.1\r\nX-Slow: ", HEAD + b"X-Slow: ")[number % 2])
    started_at = time.monotonic()
    assert hurried.complete()[0] == 200
    assert time.monotonic() - started_at < 10
    assert drip(lines, 60) == 0
    for line in lines:
        line.close()
    assert hurried.complete()[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_a_body_that_takes_too_long_ends_its_connection(hurried, path):
    with socket.create_connection(("127.0.0.1", hurried.port)) as line:
        head = HEAD.replace(b"/v1/completions", path.encode())
        line.sendall(head + b"Content-Length: 99999\r\n\r\n")
        assert drip([line], 60) == 0
        response = ended(line)
    if response:  # unless a late byte made the system discard it
        assert response.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 405 "))
    assert hurried.complete()[0] == 200


def test_a_second_request_on_a_connection_has_the_same_limit(hurried):
    with socket.create_connection(("127.0.0.1", hurried.port)) as line:
        line.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 200 ")
        line.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        assert drip([line], 60) == 0


@pytest.mark.slow
def test_a_client_that_never_reads_its_answer_is_left(hurried):
    body = json.dumps({"prompt": "x", **ENDLESS, "max_tokens": 1000000, "stream": True}).encode()
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the system holds little of it
        line.connect(("127.0.0.1", hurried.port))
        line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: hurried.counts() == (1, 0))
        wait_until(lambda: hurried.counts() == (0, 0))
        time.sleep(3)  # past the limit of 3 + 2 s
        assert b"[DONE]" not in ended(line)


def test_time_ends_an_answer_and_a_wait(started, base_run):
    server = started(base_run, "--parallel", "1", "--longest", "100000", "--seconds", "1.5")
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(server.complete, **ENDLESS, max_tokens=100000)
        wait_until(lambda: server.counts() == (1, 0))
        time.sleep(0.5)
        late = pool.submit(server.complete, **ENDLESS, max_tokens=100000)
        status, _, content = long.result()
        assert (status, content["choices"][0]["finish_reason"]) == (200, "length")
        assert 10 < content["usage"]["completion_tokens"] < 100000
        assert late.result()[0] in (200, 429)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end_and_then_the_server(started, base_run, stop):
    server = started(base_run, "--longest", "9000")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, **ENDLESS, max_tokens=1000)
        wait_until(lambda: server.counts() == (1, 0))
        server.process.send_signal(stop)
        assert answer.result()[2]["usage"]["completion_tokens"] == 1000
    printed = server.process.communicate(timeout=60)[0]
    assert (server.process.returncode, printed) == (0, "stopped\n")


def test_an_answer_that_takes_longer_than_the_grace_says_that_the_server_ends(started, base_run):
    server = started(base_run, "--longest", "1000000", "--grace", "1")
    with ThreadPoolExecutor(2) as pool:
        body = {**ENDLESS, "max_tokens": 1000000}
        unstreamed = pool.submit(server.complete, **body)
        streamed = pool.submit(server.complete, **body, stream=True)
        wait_until(lambda: server.counts() == (2, 0))
        server.process.send_signal(signal.SIGTERM)
        assert "the server ends" in error_of(unstreamed.result(), 503)
        assert "the server ends" in streamed.result()[2][-1]["error"]["message"]
    assert server.process.wait(timeout=60) == 0


def test_a_port_that_is_in_use_is_one_line_with_the_remedy(server, base_run, capsys):
    words = ["serve", str(base_run), "--port", str(server.port)]
    assert cli.main(words) == 2
    message = capsys.readouterr().err
    rule = f"another program uses 127.0.0.1:{server.port}; stop it, or choose --port 0"
    assert message == f"lockstep-gpt serve: {rule}\n"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("host", "nowhere.invalid"),
        ("host", 70 * "a"),
        ("host", "192.0.2.1"),
        ("port", "65536"),
        ("port", "-1"),
        ("parallel", "0"),
        ("waiting", "-1"),
        ("longest", "0"),
        ("seconds", "0"),
        ("seconds", "nan"),
        ("body", "0"),
    ],
)
def test_an_option_that_cannot_be_is_refused(base_run, capsys, flag, value):
    assert cli.main(["serve", str(base_run), "--port", "0", f"--{flag}={value}"]) == 2
    message = capsys.readouterr().err
    assert value in message
    assert message.count("\n") == 1


@pytest.mark.slow
def test_under_load_nothing_is_lost_and_memory_stays_flat(base_run):
    words = ["--clients", "40", "--seconds", "4", "--serve=--parallel 8 --waiting 16"]
    script = [sys.executable, ROOT / "lab/benchmarks/load_test.py", base_run, *words]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["faults"], result["left"], result["exit_status"]) == ({}, 0, 0)
    assert result["complete"] > 20
    assert result["refused"] > 0
    later_memory = result["memory"][2:]
    assert max(later_memory) - min(later_memory) < 16  # MiB


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
