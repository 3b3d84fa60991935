import type { ServerResponse } from "node:http";
import type { Answer, Seen } from "@kv/testing/http/fake-upstream";

type Fields = Record<string, unknown>;

/** Blocks that a server holds for a reader. */
interface Held {
  readonly ids: readonly number[];
  readonly scope: string;
  readonly blocks: number;
  /** The parameters that name them. */
  readonly params: Fields;
}

/**
 * A P and a D that behave as vLLM 0.33 with `bidirectional_kv_xfer`, as far as kept turns go: D
 * pins each request that ends by its length or a stop token, P reads what it is given and notifies,
 * a refused request only notifies. A token is a character. What vLLM would answer with wrong text,
 * or what would hang, is a line in `wrong`.
 */
export class TurnServers {
  /** What a router must not do. */
  readonly wrong: string[] = [];
  /** Of D, by request id. */
  readonly pinned = new Map<string, Held>();
  /** Of P, by request id. */
  readonly held = new Map<string, Held>();
  readonly counts = { computed: 0, read: 0, legs: 0, reads: 0, released: 0 };
  readonly blockTokens = 16;
  /** D's engine: a restart gives it another one, and takes its blocks. */
  engineId = "d-1";
  generation = 1;
  /** What the next prefill legs with an object do instead of reading it. */
  readonly failures: ("500" | "hang" | "break")[] = [];
  cacheBlocks = 100_000;
  hasMetrics = true;
  /** P says how many tokens of the prompt it had. */
  tellsCached = true;
  /** What other kinds of engines say in the parameters of their answers. */
  prefillSays: Fields = {};
  decodeSays: (blocks: readonly number[]) => Fields = () => ({});
  #serial = 0;

  restartDecoder(): void {
    this.engineId = `d-${this.#next()}`;
    this.pinned.clear();
  }

  get pinnedBlocks(): number {
    return [...this.pinned.values()].reduce((sum, { blocks }) => sum + blocks, 0);
  }

  readonly prefill: Answer = async (seen) => {
    const { json, path, response } = seen;
    if (path.endsWith("/render")) return send(response, { token_ids: idsOf(json) });
    const params = (json.kv_transfer_params ?? {}) as Fields;
    if (json.use_beam_search === true) return this.#free(this.pinned, params, response);
    this.counts.legs += 1;
    const ids = idsOf(json);
    let cached = 0;
    if (params.remote_block_ids != null) {
      // A D that was restarted is no peer that P could read.
      const failure = params.remote_engine_id === this.engineId ? this.failures.shift() : "500";
      if (failure === "hang") return;
      if (failure === "break") return void response.destroy();
      if (failure === "500")
        return send(response, { error: { message: "READ failed", code: 500 } }, 500);
      cached = this.#read(json, params, ids);
    }
    this.counts.computed += ids.length - cached;
    const own = this.#hold(this.held, "p", json, ids, "p-1");
    return send(response, {
      id: "cmpl-1",
      choices: [{ index: 0, text: "x", message: { role: "assistant", content: "x" } }],
      usage: {
        prompt_tokens: ids.length,
        completion_tokens: 1,
        ...(this.tellsCached ? { prompt_tokens_details: { cached_tokens: cached } } : {}),
      },
      kv_transfer_params: {
        ...own,
        ...(this.tellsCached ? { remote_prefill_cached_tokens: cached } : {}),
        ...this.prefillSays,
      },
    });
  };

  readonly decode: Answer = (seen) => {
    const { json, path, response } = seen;
    // Pairing asks for them.
    if (path === "/version" || path === "/v1/models") return send(response, {}, 404);
    if (path === "/metrics" && !this.hasMetrics) return send(response, {}, 404);
    if (path === "/metrics")
      return void response.end(
        `vllm:cache_config_info{block_size="${this.blockTokens}",engine="0",num_gpu_blocks="${this.cacheBlocks}"} 1.0\n`,
      );
    const params = json.kv_transfer_params as Fields | undefined;
    if (json.use_beam_search === true) return this.#free(this.held, params ?? {}, response);
    const ids = idsOf(json);
    const from = this.held.get(String(params?.remote_request_id));
    if (params?.do_remote_prefill !== true || from === undefined)
      this.wrong.push("D was given nothing to read");
    else if (!equal(from.ids, ids)) this.wrong.push("D's prompt is not P's");
    this.held.delete(String(params?.remote_request_id));
    const { text, finish } = outputOf(ids, json);
    const output = [...text].map(code);
    // A stop string ends the request outside of the engine, which frees its blocks.
    const own =
      finish === "stop-string"
        ? undefined
        : this.#hold(this.pinned, "d", json, [...ids, ...output].slice(0, -1), this.engineId);
    answer(seen, path.endsWith("/chat/completions"), ids, output, text, own);
  };

  /** P reads an object, or takes the wrong blocks. */
  #read(json: Fields, params: Fields, ids: readonly number[]): number {
    const id = String(params.remote_request_id);
    const object = this.pinned.get(id);
    this.counts.reads += 1;
    if (object === undefined) {
      this.wrong.push(`${id} was read again, or was never there`);
      return 0;
    }
    this.pinned.delete(id);
    const { prompt_token_ids: given, ...rest } = params;
    if (JSON.stringify(rest) !== JSON.stringify(object.params))
      this.wrong.push(`${id} was changed`);
    if (json.messages !== undefined && given === undefined)
      this.wrong.push(`${id}: P tokenises the messages itself`);
    if (object.scope !== scopeOf(json)) this.wrong.push(`${id} is of another model or salt`);
    if (ids.length <= object.ids.length) this.wrong.push(`${id} is not shorter than the prompt`);
    if (!equal(object.ids, ids.slice(0, object.ids.length)))
      this.wrong.push(`${id} is no begin of the prompt`);
    if ((json.n ?? 1) !== 1) this.wrong.push(`${id} is read for several copies`);
    this.counts.read += object.ids.length;
    return object.ids.length;
  }

  #free(held: Map<string, Held>, params: Fields, response: ServerResponse): void {
    if (params.do_remote_prefill !== true)
      this.wrong.push("a refused request that notifies nobody");
    held.delete(String(params.remote_request_id));
    this.counts.released += 1;
    send(
      response,
      { error: { message: "Streaming is not currently supported with beam search", code: 400 } },
      400,
    );
  }

  #hold(
    held: Map<string, Held>,
    name: string,
    json: Fields,
    ids: readonly number[],
    engineId: string,
  ): Fields {
    const id = `${name}-${this.#next()}`;
    const blocks = Math.ceil(ids.length / this.blockTokens);
    const blockIds = Array.from({ length: blocks }, () => this.#next());
    const params = {
      do_remote_prefill: name === "p",
      do_remote_decode: name === "d",
      remote_block_ids: [blockIds],
      remote_engine_id: engineId,
      remote_request_id: id,
      remote_host: "127.0.0.1",
      remote_port: 5600,
      tp_size: 1,
      dcp_size: 1,
      pp_size: 1,
      remote_num_tokens: ids.length,
      remote_blocks_expiry_time: 4960.27,
      remote_registration_generation: this.generation,
      transfer_mode: "pull",
      ...(name === "d" ? this.decodeSays(blockIds) : {}),
    };
    held.set(id, { ids, scope: scopeOf(json), blocks, params });
    return params;
  }

  #next(): number {
    this.#serial += 1;
    return this.#serial;
  }
}

const code = (character: string) => character.codePointAt(0) ?? 0;
const equal = (one: readonly number[], other: readonly number[]) =>
  one.length === other.length && one.every((id, at) => id === other[at]);
const scopeOf = ({ model, cache_salt: salt }: Fields) => JSON.stringify([model, salt ?? null]);

/** The text of a chat, as its template makes it. */
export function rendered(messages: readonly Fields[], tools?: unknown): string {
  const turns = messages.map(({ role, content, tool_calls: calls }) => {
    const text = Array.isArray(content)
      ? content.map((part: Fields) => part.text ?? "<image>").join("")
      : (content ?? JSON.stringify(calls));
    return `<${String(role)}>${String(text)}`;
  });
  return `${tools == null ? "" : JSON.stringify(tools)}${turns.join("")}<assistant>`;
}

export function idsOf(json: Fields): readonly number[] {
  const given = (json.kv_transfer_params as Fields | undefined)?.prompt_token_ids;
  if (Array.isArray(given)) return given as number[];
  if (Array.isArray(json.prompt)) return json.prompt as number[];
  const text = Array.isArray(json.messages)
    ? rendered(json.messages as Fields[], json.tools)
    : String(json.prompt);
  return [...text].map(code);
}

/** What the model says: a function of the prompt's ids and the seed. */
export function outputOf(
  ids: readonly number[],
  json: Fields,
): { readonly text: string; readonly finish: "length" | "stop" | "stop-string" } {
  let hash = Number(json.seed ?? 0);
  for (const id of ids) hash = (hash * 31 + id) % 1_000_003;
  const limit = Number(json.max_completion_tokens ?? json.max_tokens ?? 16);
  let text = "";
  const wanted = 1 + (hash % 40);
  while (text.length < Math.min(limit, wanted)) {
    hash = (hash * 31 + 7) % 1_000_003;
    text += "abcdefghij"[hash % 10];
  }
  const stop = typeof json.stop === "string" ? text.indexOf(json.stop) : -1;
  if (stop !== -1) return { text: text.slice(0, stop), finish: "stop-string" };
  return { text, finish: wanted <= limit ? "stop" : "length" };
}

function answer(
  { json, response }: Seen,
  isChat: boolean,
  ids: readonly number[],
  output: readonly number[],
  text: string,
  object: Fields | undefined,
): void {
  const tells = json.return_token_ids === true;
  const params = object ?? null;
  const prompt = tells ? ids : null;
  const usage = {
    prompt_tokens: ids.length,
    completion_tokens: output.length,
    total_tokens: ids.length + output.length,
  };
  const id = "cmpl-1";
  if (json.stream !== true) {
    const content = isChat
      ? { message: { role: "assistant", content: text } }
      : { text, prompt_token_ids: prompt };
    const choice = {
      index: 0,
      ...content,
      finish_reason: "stop",
      token_ids: tells ? output : null,
    };
    const own = isChat ? { prompt_token_ids: prompt } : {};
    send(response, { id, choices: [choice], usage, ...own, kv_transfer_params: params });
    return;
  }
  const events: Fields[] = [];
  if (isChat)
    events.push({
      id,
      prompt_token_ids: prompt,
      choices: [{ index: 0, delta: { role: "assistant", content: "" }, finish_reason: null }],
    });
  // Three tokens an event.
  const texts = text.match(/.{1,3}/gsu) ?? [""];
  for (const [at, piece] of texts.entries()) {
    const isLast = at === texts.length - 1;
    const own = isChat
      ? { delta: { content: piece } }
      : { text: piece, prompt_token_ids: at === 0 ? prompt : null };
    const tokens = tells ? output.slice(3 * at, 3 * at + 3) : null;
    const choice = { index: 0, ...own, finish_reason: isLast ? "stop" : null, token_ids: tokens };
    events.push({ id, choices: [choice], kv_transfer_params: isLast ? params : null });
  }
  if ((json.stream_options as Fields | undefined)?.include_usage === true)
    events.push({ id, choices: [], usage });
  response.writeHead(200, { "content-type": "text/event-stream" });
  const bytes = Buffer.from(
    `${events.map((event) => `data: ${JSON.stringify(event)}\n\n`).join("")}data: [DONE]\n\n`,
  );
  // The network ends its reads anywhere.
  const cut = ids.length % bytes.length;
  response.write(bytes.subarray(0, cut));
  response.end(bytes.subarray(cut));
}

function send(response: ServerResponse, value: unknown, status = 200): void {
  response.writeHead(status, { "content-type": "application/json" });
  response.end(JSON.stringify(value));
}
