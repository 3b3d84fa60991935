// Prints {"prefill", "decode"}: ports. P answers a prompt that contains "slow" after 3 s; its GET
// /counts has how many there were, and for how long it had one.
import { createServer } from "node:http";
import { listening } from "@kv/testing/http/listening";

const SLOW_MS = 3_000;
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
const choices = [{ index: 0, text: "right", token_ids: [1], finish_reason: "length" }];

const counts = { slow: 0, slowMs: 0 };
let slowNow = 0;
let slowSinceMs = 0;

function listen(answer: object): Promise<number> {
  const isPrefill = "kv_transfer_params" in answer;
  const server = createServer(async (request, response) => {
    const send = (value: object) =>
      response.setHeader("content-type", "application/json").end(JSON.stringify(value));
    if (request.method === "GET") return send(counts);

    let isSlow = false;
    request.on("data", (chunk: Buffer) => {
      isSlow ||= isPrefill && chunk.includes('"slow');
    });
    request.on("end", () => {
      if (!isSlow) return send(answer);
      counts.slow += 1;
      if (slowNow === 0) slowSinceMs = performance.now();
      slowNow += 1;
      setTimeout(() => send(answer), SLOW_MS);
      response.once("close", () => {
        slowNow -= 1;
        if (slowNow === 0) counts.slowMs += Math.round(performance.now() - slowSinceMs);
      });
    });
  });
  return listening(server);
}

const [prefill, decode] = [
  await listen({ choices, kv_transfer_params: PARAMS }),
  await listen({ choices }),
];
console.log(JSON.stringify({ prefill, decode }));
process.stdin.resume().on("end", () => process.exit());
