import { once } from "node:events";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { KvError, type Random, systemRandom } from "@kv/interface";
import { z } from "zod";
import type { HeadlessPrefill } from "./headless-prefill.js";

/** Options of `PrefillServer`. */
export interface PrefillServerOptions {
  /** Computes the answers. The caller closes it. */
  readonly prefill: HeadlessPrefill;
  /** The model's name in `/v1/models` and in answers. */
  readonly model: string;
  /** The answer of `/version`. */
  readonly vllmVersion: string;
  /** The metrics of the connector in Prometheus' text format, such as `memoryMetrics().render`. Default: none. */
  readonly metrics?: (() => string) | undefined;
  /** Source of the request ids' suffixes. Default: the system's. */
  readonly random?: Random | undefined;
}

const MAX_BODY_BYTES = 32 << 20;

const completionSchema = z.looseObject({
  prompt: z.array(z.int().min(0)).min(1),
  kv_transfer_params: z.looseObject({ do_remote_decode: z.literal(true) }),
});

interface Answer {
  readonly status: number;
  /** JSON, unless `type` says otherwise. */
  readonly body: object | string;
  readonly type?: string | undefined;
}

/**
 * An HTTP server with the routes of a vLLM prefill server that a proxy, a doctor and a scraper use: `/health`, `/version`, `/v1/models`,
 * `/metrics` and `/v1/completions` for prompts of token ids with `do_remote_decode`.
 */
export class PrefillServer {
  /** The server; it does not listen before `listen`. */
  readonly server: Server;
  readonly #options: PrefillServerOptions;
  readonly #random: Random;

  constructor(options: PrefillServerOptions) {
    this.#options = options;
    this.#random = options.random ?? systemRandom();
    this.server = createServer((request, response) => void this.#serve(request, response));
  }

  /** Resolves with the URL. Errors: those of Node's `listen`. */
  async listen({ host, port }: { readonly host: string; readonly port: number }): Promise<string> {
    this.server.listen({ host, port });
    await once(this.server, "listening");
    const { port: bound } = this.server.address() as AddressInfo;
    return `http://${host.includes(":") ? `[${host}]` : host}:${bound}`;
  }

  /** Ends all connections. */
  async close(): Promise<void> {
    if (!this.server.listening) return;
    const closed = once(this.server, "close");
    this.server.close();
    this.server.closeAllConnections();
    await closed;
  }

  async #serve(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const { status, body, type = "application/json" } = await this.#answer(request).catch(failure);
    response.writeHead(status, { "content-type": type });
    response.end(typeof body === "string" ? body : JSON.stringify(body));
  }

  async #answer(request: IncomingMessage): Promise<Answer> {
    const { model, vllmVersion } = this.#options;
    const { pathname } = new URL(request.url ?? "/", "http://localhost");
    switch (`${request.method} ${pathname}`) {
      case "GET /health":
        return { status: 200, body: {} };
      case "GET /version":
        return { status: 200, body: { version: vllmVersion } };
      case "GET /v1/models":
        return {
          status: 200,
          body: { object: "list", data: [{ id: model, object: "model", root: model }] },
        };
      case "GET /metrics":
        return { status: 200, body: this.#metrics(), type: "text/plain; version=0.0.4" };
      case "POST /v1/completions":
        return this.#complete(request);
      default:
        return refusal(404, `there is no route ${request.method} ${pathname}`);
    }
  }

  #metrics(): string {
    const { prefill, model, metrics = () => "" } = this.#options;
    const { total, used } = prefill.blocks;
    return [
      `vllm:cache_config_info{block_size="${prefill.blockSize}",num_gpu_blocks="${total}"} 1.0`,
      `vllm:kv_cache_usage_perc{model_name=${JSON.stringify(model)}} ${used / (total - 1)}`,
      metrics(),
    ].join("\n");
  }

  async #complete(request: IncomingMessage): Promise<Answer> {
    const { prefill, model } = this.#options;
    const parsed = completionSchema.safeParse(await readJson(request));
    if (!parsed.success) {
      const [issue] = parsed.error.issues;
      const path = issue?.path.join(".") ?? "";
      return refusal(
        400,
        `${path}: ${issue?.message ?? "invalid"}: this server has no model; it answers prompts of token ids with do_remote_decode`,
      );
    }
    const header = request.headers["x-request-id"];
    const clientId = typeof header === "string" ? header : this.#random.uuid();
    // The form of vLLM's ids: a push D finds its own request by the part before the suffix.
    const id = `cmpl-${clientId}-0-${this.#random.uuid().slice(0, 8)}`;
    const params = await prefill.prefill(id, parsed.data.prompt);
    const choice = { index: 0, text: "", logprobs: null, finish_reason: "length", token_ids: [0] };
    const completion = { id, object: "text_completion", created: 0, model, choices: [choice] };
    return { status: 200, body: { ...completion, kv_transfer_params: params } };
  }
}

/** Errors: `KV_REQUEST_INVALID` for more than 32 MiB, and for what is not JSON. */
async function readJson(request: IncomingMessage): Promise<unknown> {
  const chunks: Buffer[] = [];
  let lengthBytes = 0;
  for await (const chunk of request as AsyncIterable<Buffer>) {
    lengthBytes += chunk.length;
    if (lengthBytes > MAX_BODY_BYTES)
      throw new KvError("KV_REQUEST_INVALID", `the body is larger than ${MAX_BODY_BYTES} bytes`);
    chunks.push(chunk);
  }
  try {
    return JSON.parse(Buffer.concat(chunks).toString());
  } catch (cause) {
    throw new KvError("KV_REQUEST_INVALID", "the body is not JSON", { cause });
  }
}

const refusal = (status: number, message: string, type = "BadRequestError"): Answer => ({
  status,
  body: { error: { message, type, code: status } },
});

function failure(thrown: unknown): Answer {
  const error = KvError.from(thrown, "KV_INTERNAL", "the prompt could not be served");
  return refusal(error.code === "KV_REQUEST_INVALID" ? 400 : 503, error.message, error.code);
}
