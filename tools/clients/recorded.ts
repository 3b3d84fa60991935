import { createHash } from "node:crypto";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { setTimeout as sleep, setImmediate as turn } from "node:timers/promises";
import { type Answer, KV_PARAMS_TEXT, type Seen, sendJson } from "@kv/testing/http/fake-upstream";
import { ASKED, LONG_ANSWER } from "./requests.js";

type Fields = Readonly<Record<string, unknown>>;

/** To one leg of a request, or to the whole. */
interface Recorded {
  readonly status: number;
  readonly type: string;
  readonly body: string;
}

/** A JSON object in each line. `npm run test:clients -- --record` writes it. */
export const RECORDED = new URL("./vllm-0.33.jsonl", import.meta.url);
const PIECE_BYTES = 997;

/** What decides the answer: the leg, the route, and the body without what is always new. */
function keyOf({ method, path, json }: Seen): string {
  const { kv_transfer_params: params, request_id: _id, ...body } = json;
  const digest = createHash("sha256")
    .update(JSON.stringify(sorted(body)))
    .digest("hex")
    .slice(0, 16);
  const leg = params == null ? "alone" : isPrefill(json) ? "prefill" : "decode";
  return `${leg} ${method} ${path} ${digest}`;
}

const isPrefill = ({ kv_transfer_params: params }: Fields) =>
  (params as Fields | null | undefined)?.["do_remote_decode"] === true;

const isScripted = ({ model, max_tokens: limit }: Fields) =>
  /^(vision|unstable)/.test(String(model)) || limit === LONG_ANSWER;

function sorted(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(sorted);
  if (typeof value !== "object" || value === null) return value;
  const entries = Object.entries(value).sort(([a], [b]) => (a < b ? -1 : 1));
  return Object.fromEntries(entries.map(([name, each]) => [name, sorted(each)]));
}

/** vLLM 0.33's answers to all that the clients ask. Other models have scripts. */
export class Recordings {
  /** Their clients have not left yet. */
  streaming = 0;
  readonly #answers = new Map<string, Recorded>();
  readonly #failed = new Set<string>();

  constructor() {
    if (!existsSync(RECORDED)) return;
    for (const line of readFileSync(RECORDED, "utf8").trim().split("\n")) {
      const { key, ...answer } = JSON.parse(line) as Recorded & { readonly key: string };
      this.#answers.set(key, answer);
    }
  }

  readonly play: Answer = async (seen) => {
    const { path, json, response } = seen;
    if (path === "/health") return void response.end();
    if (json["max_tokens"] === LONG_ANSWER) return this.#stream(seen);
    if (isScripted(json)) return this.#script(String(json["model"]), seen);
    const key = keyOf(seen);
    const answer = this.#answers.get(key);
    if (answer === undefined) {
      const message = `nothing is recorded for ${key} ${seen.body}: npm run test:clients -- --record`;
      return sendJson(response, { error: { message } }, 501);
    }
    response.writeHead(answer.status, { "content-type": answer.type });
    // The network ends its reads anywhere.
    const bytes = Buffer.from(answer.body);
    for (let at = 0; at < bytes.length; at += PIECE_BYTES, await turn())
      response.write(bytes.subarray(at, at + PIECE_BYTES));
    response.end();
  };

  /** `vision` repeats what it was sent, `unstable` fails at each first time. */
  #script(model: string, { path, json, response }: Seen): void {
    const text = JSON.stringify(json["messages"]);
    // As vLLM: by such a request kv-proxy has P's blocks freed.
    if (json["use_beam_search"] === true)
      sendJson(response, { error: { message: "beam search" } }, 400);
    else if (isPrefill(json))
      sendJson(response, { kv_transfer_params: JSON.parse(KV_PARAMS_TEXT) });
    else if (model.startsWith("unstable") && !this.#failed.delete(model)) {
      this.#failed.add(model);
      response.setHeader("retry-after-ms", "1");
      sendJson(response, { error: { message: "not now", type: "server_error", code: 503 } }, 503);
    } else
      sendJson(response, path === "/v1/messages" ? messageOf(model, text) : chatOf(model, text));
  }

  async #stream({ path, response }: Seen): Promise<void> {
    const [model, isMessage] = [ASKED.model, path === "/v1/messages"];
    response.writeHead(200, { "content-type": "text/event-stream" });
    this.streaming += 1;
    response.once("close", () => {
      this.streaming -= 1;
    });
    if (isMessage) {
      response.write(event({ type: "message_start", message: messageOf(model, "") }));
      response.write(
        event({ type: "content_block_start", index: 0, content_block: { type: "text", text: "" } }),
      );
    }
    const delta = {
      type: "content_block_delta",
      index: 0,
      delta: { type: "text_delta", text: "word " },
    };
    const chunk = { ...chatOf(model, ""), object: "chat.completion.chunk" };
    const choices = [
      { index: 0, delta: { role: "assistant", content: "word " }, finish_reason: null },
    ];
    while (!response.destroyed) {
      response.write(event(isMessage ? delta : { ...chunk, choices }));
      await sleep(5);
    }
  }

  /**
   * As `play`; what is not recorded yet is asked of vLLM, which computes what a D would read: `npm
   * run test:clients -- --live`.
   */
  recorder(url: string): Answer {
    return async (seen) => {
      const { method, path, json, headers } = seen;
      const { kv_transfer_params: params, ...whole } = json;
      const isD = params != null && !isPrefill(json);
      const asked = isD ? { ...seen, json: whole, body: JSON.stringify(whole) } : seen;
      const isNew = !this.#answers.has(keyOf(seen)) && path.startsWith("/v1/") && !isScripted(json);
      if (isNew && !this.#answers.has(keyOf(asked))) {
        const id = headers["x-request-id"];
        const sent = {
          "content-type": "application/json",
          connection: "close",
          ...(typeof id === "string" ? { "x-request-id": id } : {}),
        };
        const body = method === "POST" ? asked.body : null;
        const answer = await fetch(url + path, { method, headers: sent, body });
        const type = answer.headers.get("content-type") ?? "";
        this.#answers.set(keyOf(asked), { status: answer.status, type, body: await answer.text() });
      }
      const known = this.#answers.get(keyOf(asked));
      if (isNew && known !== undefined) this.#answers.set(keyOf(seen), known);
      if (isNew) this.save();
      return this.play(seen);
    };
  }

  save(): void {
    const lines = [...this.#answers].sort(([a], [b]) => (a < b ? -1 : 1));
    writeFileSync(
      RECORDED,
      lines.map(([key, answer]) => `${JSON.stringify({ key, ...answer })}\n`).join(""),
    );
  }
}

const usage = { prompt_tokens: 1, completion_tokens: 1, total_tokens: 2 };
const chatOf = (model: string, content: string) => ({
  id: "chatcmpl-1",
  object: "chat.completion",
  created: 1,
  model,
  usage,
  choices: [{ index: 0, message: { role: "assistant", content }, finish_reason: "stop" }],
});
const messageOf = (model: string, text: string) => ({
  id: "msg_1",
  type: "message",
  role: "assistant",
  model,
  stop_reason: "end_turn",
  stop_sequence: null,
  content: text === "" ? [] : [{ type: "text", text }],
  usage: { input_tokens: 1, output_tokens: 1 },
});

/** Those of messages have their type as their name too. */
function event(data: object): string {
  const name = "type" in data ? `event: ${String(data.type)}\n` : "";
  return `${name}data: ${JSON.stringify(data)}\n\n`;
}
