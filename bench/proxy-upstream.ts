// A prefill and a decode server that answer at once: `/v1/completions` only. Prints {"prefill": port, "decode": port, "sideChannel": port}.
// Optional arguments: the two ports and that of the side channel, 0 takes a free one, and vLLM's version. Both engines answer handshakes at the one
// side channel, render prompts, and publish KV events, many times a second. The decode server refuses KV of an engine of another version.
// The stream of the prompt "hold" stays open after its first event until {"do":"release"} arrives on stdin.
import { createServer, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { startEventPublisher } from "../packages/fleet/test/support/event-publisher.js";
import { startSideChannel } from "../packages/proxy/test/support/side-channel.js";

const EVENTS = 16;
const PROMPT_TOKENS = 160;
const BLOCK_TOKENS = 16;
/** Between two batches of KV events; each stores a block and removes one. */
const BATCH_INTERVAL_MS = 20;
const [prefillPort = 0, decodePort = 0, sidePort = 0] = process.argv.slice(2, 5).map(Number);
const vllmVersion = process.argv[5] ?? "0.33.0";
const engineId = `engine-${vllmVersion}-${process.pid}`;
const { port: sideChannel } = await startSideChannel(() => ({ engineId, vllmVersion }), sidePort);
const params =
  `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4]],"remote_engine_id":"${engineId}","remote_request_id":"r",` +
  `"remote_host":"127.0.0.1","remote_port":${sideChannel},"tp_size":1,"remote_num_tokens":64,"transfer_mode":"pull"}`;
const prefillAnswer = Buffer.from(
  `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"x","finish_reason":"length"}],"kv_transfer_params":${params}}`,
);
const event =
  'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" word"}]}\n\n';
const stream = Buffer.from(`${event.repeat(EVENTS)}data: [DONE]\n\n`);
const ids = Array.from({ length: PROMPT_TOKENS }, (_, at) => 3 + at);
const rendered = JSON.stringify([{ token_ids: ids }]);

/** Publishes blocks that come and go. Returns the answer of `GET /kv_event_sources`. */
async function publishEvents(): Promise<string> {
  const { endpoint, replayEndpoint, publish } = await startEventPublisher({ bufferSteps: 100 });
  const stored = (hash: number, tokens: readonly number[]) => ({
    ...{ type: "BlockStored", block_hashes: [hash], parent_block_hash: null, token_ids: tokens },
    ...{ block_size: tokens.length, lora_id: null, medium: "GPU", lora_name: null, group_idx: 0 },
  });
  let hash = 0;
  setInterval(() => {
    hash += 1;
    const removed = { type: "BlockRemoved", block_hashes: [hash - 100], medium: "GPU", group_idx: 0 };
    void publish([stored(hash, Array(BLOCK_TOKENS).fill(1000 + hash)), removed]).catch(() => {});
  }, BATCH_INTERVAL_MS).unref();
  return JSON.stringify({ 0: { publisher: "zmq", endpoint, replay_endpoint: replayEndpoint } });
}

const held = new Set<ServerResponse>();

async function serve(
  port: number,
  events: string,
  answer: (body: string, response: ServerResponse) => void,
): Promise<number> {
  const server = createServer((request, response) => {
    const chunks: Buffer[] = [];
    request.on("data", (chunk: Buffer) => chunks.push(chunk));
    request.on("end", () => {
      if (request.method === "GET") {
        response.writeHead(200, { "content-type": "application/json" });
        response.end(
          request.url === "/kv_event_sources"
            ? events
            : '{"object":"list","data":[{"id":"m","object":"model"}]}',
        );
      } else if (request.url?.endsWith("/render") === true) {
        response.writeHead(200, { "content-type": "application/json" });
        response.end(rendered);
      } else answer(Buffer.concat(chunks).toString("latin1"), response);
    });
  });
  server.keepAliveTimeout = 60_000;
  await new Promise<void>((resolve) => server.listen(port, "127.0.0.1", 4096, resolve));
  return (server.address() as AddressInfo).port;
}

const prefill = await serve(prefillPort, await publishEvents(), (_body, response) => {
  response.writeHead(200, { "content-type": "application/json", "content-length": prefillAnswer.length });
  response.end(prefillAnswer);
});
const decode = await serve(decodePort, await publishEvents(), (body, response) => {
  const [, other] = /"remote_engine_id":"engine-([^-]*)-/.exec(body) ?? [];
  if (other !== undefined && other !== vllmVersion) {
    response.writeHead(409).end(`KV of vLLM ${other} at a decode server of vLLM ${vllmVersion}`);
    return;
  }
  response.writeHead(200, { "content-type": "text/event-stream; charset=utf-8" });
  if (!body.includes('"hold"')) {
    response.end(stream);
    return;
  }
  held.add(response);
  response.once("close", () => held.delete(response));
  response.write(event);
});
process.stdout.write(`${JSON.stringify({ prefill, decode, sideChannel })}\n`);
process.stdin.on("data", () => {
  for (const response of held) response.end("data: [DONE]\n\n");
});
process.stdin.on("end", () => process.exit(0));
