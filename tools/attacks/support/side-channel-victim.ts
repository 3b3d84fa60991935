import { createServer } from "node:http";
import { zmqSideChannel } from "@kv/side-channel";

// A program that is attacked: `serve` answers handshakes, and HTTP beside them; `ask PORT` sends
// requests to a listener, one after another, when its parent says so. It answers each other message
// of its parent at once, unless its event loop is blocked.

const host = "127.0.0.1";
const [role, port] = process.argv.slice(2);
const send = (message: unknown) => process.send?.(message);
const begin = new Promise<void>((resolve) => {
  process.on("message", (message) => (message === "begin" ? resolve() : send({ echo: message })));
});

if (role === "serve") {
  const payload = Buffer.alloc(20_000, "metadata");
  const side = zmqSideChannel();
  const answer = (frames: readonly Uint8Array[]) =>
    frames.length === 1 && frames[0]?.byteLength === 17 ? [payload, Buffer.alloc(9)] : undefined;
  const listener = await side.listen({ host, port: 0, answer });
  const http = createServer((_, response) => response.end("ok"));
  http.listen(0, host, () =>
    send({ port: listener.port, http: (http.address() as { port: number }).port }),
  );
} else {
  const side = zmqSideChannel();
  let refused = 0;
  send({ ready: true });
  await begin;
  for (let attempt = 0; attempt < 3; attempt += 1) {
    const request = side.request({
      host,
      port: Number(port),
      frames: [Buffer.alloc(17)],
      timeoutMs: 5000,
    });
    await request.catch(() => {
      refused += 1;
    });
  }
  send({ refused });
}
