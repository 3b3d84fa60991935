// A prefill and a decode server that answer at once. Prints {"prefill": port, "decode": port,
// "sideChannel": port}. Optional arguments: these ports, 0 takes a free one, vLLM's version, and
// whether the KV events are lies. The decode server refuses KV of an engine of another version.
import { createServer, type ServerResponse } from "node:http";
import { listening } from "@kv/testing/http/listening";
import { startSideChannel } from "@kv/testing/http/side-channel";
import {
  MODELS,
  prefillAnswer,
  publishEvents,
  RENDERED,
  STREAM,
  STREAMS,
  WHOLE,
} from "./upstream-answers.js";

const [prefillPort = 0, decodePort = 0, sidePort = 0] = process.argv.slice(2, 5).map(Number);
const vllmVersion = process.argv[5] ?? "0.33.0";
const lies = process.argv[6] === "true" ? Array<number>(16).fill(7) : undefined;
const engineId = `engine-${vllmVersion}-${process.pid}`;
const { port: sideChannel } = await startSideChannel(() => ({ engineId, vllmVersion }), sidePort);
const prefilled = Buffer.from(prefillAnswer(engineId, sideChannel));
const stream = Buffer.from(STREAM);

function serve(
  port: number,
  events: string,
  answer: (body: string, response: ServerResponse, path: string) => void,
): Promise<number> {
  const server = createServer((request, response) => {
    const chunks: Buffer[] = [];
    request.on("data", (chunk: Buffer) => chunks.push(chunk));
    request.on("end", () => {
      if (request.method === "GET") {
        response.writeHead(200, { "content-type": "application/json" });
        response.end(request.url === "/kv_event_sources" ? events : MODELS);
      } else if (request.url?.endsWith("/render") === true) {
        response.writeHead(200, { "content-type": "application/json" });
        response.end(RENDERED);
      } else answer(Buffer.concat(chunks).toString("latin1"), response, request.url ?? "");
    });
  });
  server.keepAliveTimeout = 60_000;
  return listening(server, port);
}

const prefill = await serve(prefillPort, await publishEvents(lies), (_body, response) => {
  response.writeHead(200, {
    "content-type": "application/json",
    "content-length": prefilled.length,
  });
  response.end(prefilled);
});
const decode = await serve(decodePort, await publishEvents(lies), (body, response, path) => {
  const [, other] = /"remote_engine_id":"engine-([^-]*)-/.exec(body) ?? [];
  if (other !== undefined && other !== vllmVersion) {
    response.writeHead(409).end(`KV of vLLM ${other} at a decode server of vLLM ${vllmVersion}`);
    return;
  }
  if (!body.includes('"stream":true'))
    return void response.setHeader("content-type", "application/json").end(WHOLE);
  response.writeHead(200, { "content-type": "text/event-stream; charset=utf-8" });
  response.end(STREAMS[path] ?? stream);
});
process.stdout.write(`${JSON.stringify({ prefill, decode, sideChannel })}\n`);
process.stdin.on("end", () => process.exit(0)).resume();
