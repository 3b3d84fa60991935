// A prefill and a decode server in one process, for attacks on the proxy. Prints {"prefill": port,
// "decode": port, ...}. A prompt that contains "slow" is answered after 3 s. The decode server
// counts nothing; the prefill server's `GET /counts` has the requests so far, and for how long it
// has had a slow one.
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";

const PARAMS = {
  do_remote_prefill: true,
  do_remote_decode: false,
  remote_block_ids: [[1]],
  remote_engine_id: "e",
  remote_request_id: "r",
  remote_host: "127.0.0.1",
  remote_port: 5600,
  tp_size: 1,
};
const SLOW_MS = 3_000;

const counts = { requests: 0, slowMs: 0 };
let slowOnes = 0;
let slowSinceMs = 0;

function sendJson(response: ServerResponse, value: object): void {
  response.setHeader("content-type", "application/json");
  response.end(JSON.stringify(value));
}

async function answer(
  request: IncomingMessage,
  response: ServerResponse,
  prefill: boolean,
): Promise<void> {
  if (request.method === "GET") return sendJson(response, counts);
  if (prefill) counts.requests += 1;
  let slow = false;
  for await (const chunk of request) slow ||= (chunk as Buffer).includes('"slow');
  const choices = [{ index: 0, text: "right", token_ids: [1], finish_reason: "length" }];
  const send = () =>
    sendJson(response, prefill ? { choices, kv_transfer_params: PARAMS } : { choices });
  if (!slow || !prefill) return send();
  if (slowOnes === 0) slowSinceMs = performance.now();
  slowOnes += 1;
  setTimeout(send, SLOW_MS);
  response.once("close", () => {
    slowOnes -= 1;
    if (slowOnes === 0) counts.slowMs += Math.round(performance.now() - slowSinceMs);
  });
}

async function listen(prefill: boolean): Promise<number> {
  const server = createServer((request, response) => {
    answer(request, response, prefill).catch(() => response.destroy());
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return (server.address() as AddressInfo).port;
}

process.stdout.write(
  `${JSON.stringify({ prefill: await listen(true), decode: await listen(false) })}\n`,
);
// The end of the parent is the end of this process.
process.stdin.resume().on("end", () => process.exit());
