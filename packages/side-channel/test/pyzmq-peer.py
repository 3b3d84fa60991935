"""The two ends of vLLM's side channel over pyzmq: `ask PORT` sends requests, `answer` prints its port and answers until it is killed."""

import json
import sys

import zmq


def ask(port: str) -> None:
    answered = 0
    for size in range(100):
        # As vLLM does: one context and one REQ per handshake.
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.RCVTIMEO, 5000)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{port}")
            for _ in range(2):
                request = b"x" * (size * 5)
                socket.send(request)
                assert socket.recv_multipart() == [request, b"1.5"]
        answered += 1
    print(json.dumps({"answered": answered}), flush=True)


def answer() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
        while True:
            identity, _, request = socket.recv_multipart()
            socket.send_multipart((identity, b"", request, b"1.5"))


if __name__ == "__main__":
    ask(sys.argv[2]) if sys.argv[1] == "ask" else answer()
