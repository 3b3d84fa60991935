// A prefill and a decode server that answer at once: `/v1/completions` only. Prints {"prefill": port, "decode": port}.
// Optional arguments: the two ports, in this order; 0 takes a free one.
// The stream of the prompt "hold" stays open after its first event until {"do":"release"} arrives on stdin.
import { createServer, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";

const EVENTS = 16;
const params =
  '{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4]],"remote_engine_id":"e","remote_request_id":"r",' +
  '"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"remote_num_tokens":64,"transfer_mode":"pull"}';
const prefillAnswer = Buffer.from(
  `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"x","finish_reason":"length"}],"kv_transfer_params":${params}}`,
);
const event =
  'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" word"}]}\n\n';
const stream = Buffer.from(`${event.repeat(EVENTS)}data: [DONE]\n\n`);
const held = new Set<ServerResponse>();

const [prefillPort = 0, decodePort = 0] = process.argv.slice(2).map(Number);

async function serve(
  port: number,
  answer: (body: string, response: ServerResponse) => void,
): Promise<number> {
  const server = createServer((request, response) => {
    const chunks: Buffer[] = [];
    request.on("data", (chunk: Buffer) => chunks.push(chunk));
    request.on("end", () => {
      if (request.method === "GET") {
        response.writeHead(200, { "content-type": "application/json" });
        response.end('{"object":"list","data":[{"id":"m","object":"model"}]}');
      } else answer(Buffer.concat(chunks).toString("latin1"), response);
    });
  });
  server.keepAliveTimeout = 60_000;
  await new Promise<void>((resolve) => server.listen(port, "127.0.0.1", 4096, resolve));
  return (server.address() as AddressInfo).port;
}

const prefill = await serve(prefillPort, (_body, response) => {
  response.writeHead(200, { "content-type": "application/json", "content-length": prefillAnswer.length });
  response.end(prefillAnswer);
});
const decode = await serve(decodePort, (body, response) => {
  response.writeHead(200, { "content-type": "text/event-stream; charset=utf-8" });
  if (!body.includes('"hold"')) {
    response.end(stream);
    return;
  }
  held.add(response);
  response.once("close", () => held.delete(response));
  response.write(event);
});
process.stdout.write(`${JSON.stringify({ prefill, decode })}\n`);
process.stdin.on("data", () => {
  for (const response of held) response.end("data: [DONE]\n\n");
});
process.stdin.on("end", () => process.exit(0));
