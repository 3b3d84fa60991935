// GET /ask/PORT sends three requests to a listener, and tells how many were refused. Prints
// {"port", "http"}.
import { createServer } from "node:http";
import { zmqSideChannel } from "@kv/side-channel";
import { listening } from "@kv/testing/http/listening";

const host = "127.0.0.1";
const payload = Buffer.alloc(20_000, "metadata");
const side = zmqSideChannel();
const { port } = await side.listen({
  host,
  port: 0,
  answer: (frames) =>
    frames.length === 1 && frames[0]?.byteLength === 17 ? [payload, Buffer.alloc(9)] : undefined,
});

async function refusedBy(hostile: number): Promise<number> {
  let refused = 0;
  for (let attempt = 0; attempt < 3; attempt += 1) {
    const frames = [Buffer.alloc(17)];
    await side.request({ host, port: hostile, frames, timeoutMs: 5000 }).catch(() => {
      refused += 1;
    });
  }
  return refused;
}

const http = createServer(async ({ url = "" }, response) => {
  const [, hostile] = /^\/ask\/(\d+)/.exec(url) ?? [];
  response.end(hostile === undefined ? "ok" : String(await refusedBy(Number(hostile))));
});
console.log(JSON.stringify({ port, http: await listening(http) }));
process.stdin.resume().on("end", () => process.exit());
