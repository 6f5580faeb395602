"""A page in the browser: texts before and after an edit, the rows of a prompt, and chat.

    python lab/page.py                      # of the run in out
    python lab/page.py --ckpt out/chats --port 8001

Open the address that it prints. One name reads another's rows, in all layers or in those that are
ticked; or a fact is written into a name's rows, which takes seconds. Facts stay until they are
undone or the command ends; no file changes (edit.py --save writes one). The page serves this
machine alone, and no other website.
"""

import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Before torch, whose threads it tells how to wait.
import common
from common import UserError

# isort: split
from lab.rows import compared, nearest, swapped
from sample import Chat, Sampling
from text.spelling import typed
from text.tokenizer import encode
from training import edits
from training.decoding import chats, load_to_decode

HOST = "127.0.0.1"
ACTIONS = {"/about", "/change", "/undo", "/rows", "/chat", "/stop"}


class Page(ThreadingHTTPServer):
    """A model, what was written into it, and the server that shows both.

    A request is a record: of an action below the arguments, by their names. Its answer is records,
    a line each."""

    allow_reuse_address = sys.platform != "win32"  # where two programs would share the port

    def __init__(self, ckpt: str, port: int) -> None:
        """port: 0 is any that is free. UserError: another program has the port, or as
        `load_to_decode`."""
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"--port {port}: {error}: choose another, or 0 for any") from None
        device = common.pick_device("auto")
        self.model, self.encoding, self.checkpoint = load_to_decode(ckpt, device)
        self.model.blocks[0].register_forward_pre_hook(self.check_stop)
        layers = [layer for layer, block in enumerate(self.model.blocks) if block.row_width]
        self.chats = chats(self.checkpoint)
        example = {"source": "Spain", "target": "Germany", "write": "Lisbon."}
        if edits.has_own_text(self.checkpoint):
            example = {}
        self.about = {"ckpt": ckpt, "layers": layers, "chats": self.chats, "example": example}
        # What was written, each with the tables that have it, and the facts that are to stay then.
        earlier = edits.written_facts(self.checkpoint, self.model)
        self.facts = [("", self.model.tables, earlier)]
        self.talk: Chat | None = None
        self.busy = threading.Lock()
        self.stop = threading.Event()

    def check_stop(self, *_):
        if self.stop.is_set():
            raise KeyboardInterrupt

    def answer(self, path: str, body: bytes) -> Iterator[dict]:
        """What a request asks for, or an error, and how things are then."""
        if path == "/stop":
            self.stop.set()
            return
        if not self.busy.acquire(blocking=False):
            yield {"error": "one request at a time: wait for another page's"}
            yield self.state()  # of which a page that has just been opened is made
            return
        try:
            self.stop.clear()
            if path != "/about":
                yield from getattr(self, path[1:])(**json.loads(body))
        except json.JSONDecodeError as error:
            yield {"error": f"the request is no JSON: {error}"}
        except UserError as error:
            yield {"error": str(error).replace("--", "")}  # fields are named like flags
        except KeyboardInterrupt:
            yield {"error": "stopped"}
        finally:
            self.model.tables = self.facts[-1][1]
            self.busy.release()
        yield self.state()

    def state(self) -> dict:
        """What the page shows beside answers: the model, and the facts that are written."""
        return {**self.about, "facts": [fact for fact, *_ in self.facts[1:]]}

    def change(self, texts: dict[str, str], tables: list[int]) -> Iterator[dict]:
        """What the model writes before and after an edit: a name reads another's rows in some
        tables, or a fact is written, which stays if the model says it then."""
        edits.check_editable(self.model)
        wanted = edits.Edit(chat=self.chats, **texts)
        edits.fill_in(wanted, self.encoding, self.checkpoint)
        earlier = [*self.facts[-1][2]]
        with redirect_stdout(io.StringIO()) as said:
            located, after = edits.new_rows(self.model, self.encoding, wanted, earlier)
        notes = said.getvalue().strip().replace("--", "")  # fields are named like flags
        if wanted.target:
            extra = swapped(after.tables, located.prompt, after.ids, tables)
            after = edits.State(extra, extra.ids)
        texts = compared(self.model, self.encoding, wanted, located, after)
        yield {"prompt": wanted.prompt, "notes": notes, **texts}
        if wanted.target:
            return
        answer = edits.as_written(self.model, located)
        if not answer:
            reason = edits.why_not_written(self.model, self.encoding, located)
            raise UserError(f"not learned, and not kept: {reason}")
        earlier.append((located.prompt, answer))
        self.facts.append((f"{wanted.source}: {wanted.write}", after.tables, earlier))

    def undo(self) -> Iterator[dict]:
        if len(self.facts) == 1:
            raise UserError("no fact was written")
        self.facts.pop()
        yield {}

    def rows(self, prompt: str, table: int) -> Iterator[dict]:
        """The tokens of a prompt with their neighbors in a table."""
        edits.check_editable(self.model)
        ids = encode(self.encoding, typed(self.encoding, prompt))
        yield {"rows": nearest(self.model.tables, self.encoding, ids, table)}

    def chat(self, message: str, new: bool) -> Iterator[dict]:
        """An answer as it comes, in a conversation, which may be new."""
        if new or self.talk is None:
            self.talk = Chat(self.model, self.encoding)
        pieces = self.talk.reply(message, Sampling.max_new_tokens, temperature=Sampling.temperature)
        for piece in pieces:
            yield {"piece": piece}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.begin(self.path == "/", "text/html; charset=utf-8"):
            self.wfile.write(Path(__file__).with_suffix(".html").read_bytes())

    def do_POST(self):
        # Another website's request is not read: it may have no end.
        if self.begin(self.path in ACTIONS, "application/x-ndjson"):
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            with suppress(ConnectionError):  # nobody is there any more
                for record in self.server.answer(self.path, body):
                    self.wfile.write(json.dumps(record).encode() + b"\n")

    def begin(self, found: bool, kind: str) -> bool:
        """Begin a response; an error if there is nothing, or another website asks: by its own name,
        or by one that it has led to this machine."""
        host = self.headers.get("Host", "")
        own = host.partition(":")[0] in (HOST, "localhost")
        own = own and self.headers.get("Origin", f"http://{host}") == f"http://{host}"
        if not own or not found:
            self.send_error(404 if own else 403)
            return False
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.end_headers()
        return True


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--ckpt", default="out", help="checkpoint, or folder of a run")
    parser.add_argument("--port", type=int, default=8000, help="8000; 0 is any that is free")
    with Page(**vars(parser.parse_args())) as page:
        print(f"open http://{HOST}:{page.server_port} (Ctrl-C ends it)", flush=True)
        try:
            page.serve_forever()
        finally:  # a thread that computes while Python ends aborts the process
            page.stop.set()
            page.busy.acquire()


if __name__ == "__main__":
    common.run_command(main)
