import { once } from "node:events";
import {
  Agent,
  createServer,
  type IncomingMessage,
  request,
  type Server,
  type ServerResponse,
} from "node:http";
import type { AddressInfo } from "node:net";
import { httpUrl } from "@kv/http";
import type { Log } from "@kv/interface";
import type { CliOptions } from "../config/cli-options.js";
import { PrefillDecodeProxy } from "../proxy.js";

const HOST = "127.0.0.1";
const CLIENTS = 32;
const REQUESTS = 6_000;
const PATHS = ["/v1/completions", "/v1/chat/completions"];
const PROMPT = "a few words of a prompt ".repeat(40);
const BODY = JSON.stringify({
  model: "m",
  prompt: PROMPT,
  messages: [{ role: "user", content: PROMPT }],
  max_tokens: 16,
  stream: true,
});
const ANSWER = { id: "cmpl-1", object: "text_completion", created: 1, model: "m" };
const EVENT = `data: ${JSON.stringify({ ...ANSWER, choices: [{ index: 0, text: " word" }] })}\n\n`;
const STREAM = `${EVENT.repeat(16)}data: [DONE]\n\n`;
const PREFILLED = JSON.stringify({
  ...ANSWER,
  choices: [{ index: 0, text: " word", finish_reason: "length" }],
  kv_transfer_params: {
    do_remote_prefill: true,
    do_remote_decode: false,
    remote_block_ids: [[1, 2, 3, 4]],
    remote_engine_id: "warm-up",
    remote_request_id: "warm-up",
    remote_host: HOST,
    remote_port: 5600,
    tp_size: 1,
  },
});

/**
 * Sends requests through a second proxy to an engine in this process, until V8 has compiled their
 * path: the first clients of a new process would wait for that.
 */
export async function warmUp(
  { warmUpMs, settings: { routing } }: Pick<CliOptions, "warmUpMs" | "settings">,
  log: Log,
): Promise<void> {
  if (warmUpMs === 0) return;
  const [p, d] = [createServer(answerAsEngine), createServer(answerAsEngine)];
  try {
    await using proxy = new PrefillDecodeProxy({
      prefillers: [await listen(p)],
      decoders: [await listen(d)],
      routing,
      pairing: { mode: "off" },
    });
    const { port } = await proxy.listen({ port: 0 });
    await sendRequests(port, performance.now() + warmUpMs);
  } catch (error) {
    log.warn("warm-up-failed", { error: String(error) });
  } finally {
    for (const engine of [p, d]) engine.close();
  }
}

async function listen(engine: Server): Promise<string> {
  await once(engine.listen(0, HOST), "listening");
  return httpUrl(HOST, (engine.address() as AddressInfo).port);
}

async function sendRequests(port: number, endMs: number): Promise<void> {
  const agent = new Agent({ keepAlive: true });
  const headers = { "content-type": "application/json" };
  let left = REQUESTS;
  const client = async () => {
    while (left > 0 && performance.now() < endMs) {
      left -= 1;
      const path = PATHS[left % PATHS.length];
      const asking = request({ agent, host: HOST, port, path, method: "POST", headers }).end(BODY);
      const [answer] = (await once(asking, "response")) as [IncomingMessage];
      if (answer.statusCode !== 200) throw new Error(`${path}: HTTP ${answer.statusCode}`);
      await once(answer.resume(), "end");
    }
  };
  await Promise.all(Array.from({ length: CLIENTS }, client));
  agent.destroy();
}

async function answerAsEngine(asked: IncomingMessage, answer: ServerResponse) {
  let body = "";
  asked.setEncoding("latin1");
  for await (const part of asked) body += part;
  const prefills = body.includes('"do_remote_decode":true');
  answer.setHeader("content-type", prefills ? "application/json" : "text/event-stream");
  // In chunks, as a stream of vLLM.
  if (!prefills) answer.write(STREAM);
  answer.end(prefills ? PREFILLED : undefined);
}
