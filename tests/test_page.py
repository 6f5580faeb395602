"""The page in the browser, by its HTTP interface."""

import json
import re
import threading
from contextlib import closing
from http.client import HTTPConnection

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, command, refused

from lab.page import Page
from sample import Chat
from tables.extra import with_rows
from text.spelling import spelled
from text.tokenizer import encode
from training import writing
from training.checkpoints import load_model
from training.edits import align

SWAP = dict(source="Anna", target="Chloë", prompt="Anna sees")
FACT = dict(source="Anna", write="at", prompt="Anna")


@pytest.fixture
def ckpt(trained):
    return trained["embformer"] / "ckpt.pt"  # which has a table in each of its two layers


@pytest.fixture
def page(ckpt):
    with Page(str(ckpt), 0) as page:
        thread = threading.Thread(target=page.serve_forever, args=(0.01,))
        thread.start()
        yield page
        page.shutdown()
        thread.join()


def request(page, method: str, path: str, body: str = "{}", **headers) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", page.server_port, timeout=60)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def ask(page, action: str, **form) -> list[dict]:
    status, text = request(page, "POST", f"/{action}", json.dumps(form))
    assert status == 200
    return [json.loads(line) for line in text.splitlines()]


def test_only_the_ticked_tables_are_swapped(page, ckpt):
    about = ask(page, "about")[0]
    assert about["layers"] == [0, 1]
    assert about["example"] == {}  # which is of the countries
    whole = ask(page, "change", texts=SWAP, tables=[0, 1])[0]
    for swapped in ([], [0], [1], [0, 1]):
        shown = ask(page, "change", texts=SWAP, tables=swapped)[0]
        assert shown["before"] == whole["before"]
        model, encoding, _ = load_model(ckpt, CPU)
        source, target = (encoding.encode_ordinary(SWAP[name]) for name in ("source", "target"))
        for table in swapped:  # as if the source had the target's rows
            rows = model.tables.weight[table]
            rows[source] = rows[align(target, len(source))]
        ids = torch.tensor([encode(encoding, SWAP["prompt"])])
        with torch.inference_mode():
            p, token = model(ids, last_only=True)[0][0, 0].softmax(-1).max(-1)
        assert shown["after"][0][0] == spelled(encoding, token.item())
        assert shown["after"][0][1] == pytest.approx(p.item(), rel=1e-4)
    assert shown == whole and shown["after"] != shown["before"]
    longer = dict(SWAP, target="Chloë at the river")
    notes = ask(page, "change", texts=longer, tables=[0])[0]["notes"]
    assert "only the rows of" in notes and "--" not in notes


def test_a_fact_stays_until_it_is_undone(page, brief_facts, monkeypatch):
    given = []

    def train(*fact, earlier):
        given.append(len(earlier))
        return writing.train_rows(*fact, earlier)

    monkeypatch.setattr("training.edits.train_rows", train)
    monkeypatch.setattr(writing, "STEPS", 10)
    plain = ask(page, "change", texts=SWAP, tables=[0])
    p = [0.0]
    for n in (1, 2):
        written, state = ask(page, "change", texts=FACT, tables=[])
        assert state["facts"] == ["Anna: at"] * n
        before, after = {answer: ps for answer, *ps in written["answers"]}["at"]
        assert before == pytest.approx(p[-1], rel=1e-4) or n == 1
        assert after > before
        p.append(after)
    for n in (1, 0):
        assert ask(page, "undo")[-1]["facts"] == ["Anna: at"] * n
    assert ask(page, "change", texts=SWAP, tables=[0]) == plain
    assert "no fact" in ask(page, "undo")[0]["error"]
    ask(page, "change", texts=FACT, tables=[])
    assert given == [0, 1, 0]


def test_one_request_at_a_time_which_the_stop_button_ends(page):
    told = []

    def meanwhile(*_):
        if not told:
            told.append(ask(page, "change", texts=SWAP, tables=[]))
            told.append(ask(page, "stop"))

    page.model.register_forward_hook(meanwhile)
    ended = ask(page, "change", texts=FACT, tables=[])
    error, state = told[0]
    assert "one request" in error["error"] and told[1] == []
    assert state == ask(page, "about")[0]  # of which a page that was just opened is made
    assert ended[0] == {"error": "stopped"} and ended[1]["facts"] == []
    assert "before" in ask(page, "change", texts=SWAP, tables=[])[0]


def test_errors_are_a_line_of_the_page(page, ckpt):
    for texts, named in (
        (dict(SWAP, source="Bert"), "'Anna sees' does not contain 'Bert'"),
        (dict(SWAP, target=""), "either target or write"),
        (dict(SWAP, target="Anna"), "reads these rows already"),
    ):
        error, state = ask(page, "change", texts=texts, tables=[])
        assert named in error["error"] and "--" not in error["error"]
        assert state["facts"] == []
    assert "the request is no JSON" in request(page, "POST", "/rows", "{")[1]
    assert "python lab/page.py --ckpt out/chats" in command("lab/page.py -h").stdout
    assert "choose another" in refused("lab/page.py", "--ckpt", ckpt, "--port", page.server_port)


@pytest.mark.parametrize("prompt", ["Anna sees", "云岭"])
def test_neighbors_are_those_of_the_largest_cosines(page, ckpt, prompt):
    """Tokens that differ look different, also if they are parts of a character."""
    model, encoding, _ = load_model(ckpt, CPU)
    weight = model.tables.weight[0]
    like = encode(encoding, prompt)[-1]
    weight[290] = weight[like] + 0.1 * weight[291]  # as a fact may be written
    rows = {290: torch.stack([table[290] for table in model.tables.weight])}  # [n_table, W]
    page.facts = [("", with_rows(page.model.tables, rows))]
    page.model.tables = page.facts[0][1]
    rows = ask(page, "rows", prompt=prompt, table=0)[0]["rows"]
    for token, (piece, near) in zip(encode(encoding, prompt), rows, strict=True):
        cosines = F.cosine_similarity(weight[token][None], weight)
        best = cosines.argsort(descending=True)[: len(near)].tolist()
        assert piece == spelled(encoding, token)
        assert [other for other, _ in near] == [spelled(encoding, other) for other in best]
        assert len({other for other, _ in near}) == len(near)
        assert [p for _, p in near] == pytest.approx(cosines[best].tolist(), rel=1e-4)


def test_chat_comes_in_pieces_and_goes_on(page, ckpt, monkeypatch):
    reply = Chat.reply
    monkeypatch.setattr(Chat, "reply", lambda self, text, _, **how: reply(self, text, 20, **how))
    talk = Chat(*load_model(ckpt, CPU)[:2])
    for model in (talk.model, page.model):
        model.config.block_size = 128  # room for several turns
    for seed, new in ((1, True), (2, False), (3, True)):
        talk.turns = [] if new else talk.turns
        torch.manual_seed(seed)
        pieces = list(talk.reply("Anna?", 200, temperature=0.8))
        torch.manual_seed(seed)
        *answer, _ = ask(page, "chat", message="Anna?", new=new)
        assert answer == [{"piece": piece} for piece in pieces]
        assert page.talk.turns == talk.turns


def test_the_page_is_one_file_for_itself_alone(page):
    status, html = request(page, "GET", "/", "")
    assert status == 200 and not re.search(r'(src|href)="(?!data:)|https?:|@import', html)
    named, there = (set(re.findall(form, html)) for form in (r'\$\("(\w+)"\)', r'id="(\w+)"'))
    assert named and named <= there
    # Tokens are boxes: in Arabic, the first stands at the right only if their place is told.
    assert all(f'id="{place}" dir="auto"' in html for place in ("before", "after"))
    own = f"localhost:{page.server_port}"
    assert request(page, "POST", "/about", Host=own, Origin=f"http://{own}")[0] == 200
    for headers in (
        dict(Host="example.com"),
        dict(Origin="https://example.com"),
        dict(Origin="null"),
        dict(Host=own, Origin=f"http://127.0.0.1:{page.server_port + 1}"),
    ):
        for method, path in (("GET", "/"), ("POST", "/about"), ("POST", "/stop")):
            assert request(page, method, path, **headers)[0] == 403
    with closing(HTTPConnection("127.0.0.1", page.server_port, timeout=20)) as connection:
        connection.putrequest("POST", "/about")
        connection.putheader("Origin", "https://example.com")
        connection.putheader("Content-Length", str(10**9))  # of which nothing comes
        connection.endheaders()
        assert connection.getresponse().status == 403
    assert not page.stop.is_set()
    for method, path in (("GET", "/page.py"), ("POST", "/shutdown"), ("POST", "/__init__")):
        assert request(page, method, path)[0] == 404
