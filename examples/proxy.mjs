// kv-proxy in front of two scripted servers: a request goes to P, which computes the prompt, then
// to D with P's answer.
import { once } from "node:events";
import { createServer } from "node:http";
import { text } from "node:stream/consumers";
import { createProxy } from "@kv/proxy";

/** A server that prints what it is asked for, and answers like vLLM. */
async function startServer(name, answer) {
  const server = createServer(async (request, response) => {
    if (request.method !== "POST") return response.end("{}"); // health checks
    const { max_tokens, kv_transfer_params } = JSON.parse(await text(request));
    console.log(`${name}: ${max_tokens} tokens,`, kv_transfer_params);
    response.setHeader("content-type", "application/json").end(JSON.stringify(answer));
  });
  await once(server.listen(0, "127.0.0.1"), "listening");
  const address = server.address();
  return { server, at: typeof address === "object" ? `127.0.0.1:${address?.port}` : "" };
}

const choices = [{ index: 0, text: " blue", finish_reason: "length" }];
const kept = { remote_engine_id: "p", remote_request_id: "r", remote_block_ids: [[5, 9, 2]] };
const where = { remote_host: "127.0.0.1", remote_port: 5600, tp_size: 1 };
const kv_transfer_params = { do_remote_prefill: true, do_remote_decode: false, ...kept, ...where };
const p = await startServer("P", { id: "cmpl-1", choices, kv_transfer_params });
const d = await startServer("D", { id: "cmpl-1", choices });

const proxy = createProxy({ prefillers: [p.at], decoders: [d.at] });
const { url } = await proxy.listen({ port: 0 });
const body = JSON.stringify({ model: "m", prompt: "The sky is", max_tokens: 16 });
const headers = { "content-type": "application/json" };
const response = await fetch(`${url}/v1/completions`, { method: "POST", headers, body });
console.log("client:", await response.text());
await proxy.close();
for (const { server } of [p, d]) server.close();
