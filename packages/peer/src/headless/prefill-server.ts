import { once } from "node:events";
import type { IncomingMessage, Server, ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { ByteCollector, JsonScan } from "@kv/fleet/front-end";
import { KvError, type Random, systemRandom } from "@kv/interface";
import { z } from "zod";
import { createLimitedServer, type HttpLimits } from "../http/limited-server.js";
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
  /** Other limits than `PREFILL_LIMITS`. */
  readonly limits?: Partial<PrefillLimits> | undefined;
}

/** Bounds of a `PrefillServer`. */
export interface PrefillLimits extends HttpLimits {
  /** Bytes of one body; more get 413. */
  readonly maxBodyBytes: number;
  /** Bytes of the bodies of all requests that have no answer; more get 503. */
  readonly maxBodiesBytes: number;
  /** The same of one remote address. */
  readonly maxBodiesBytesPerAddress: number;
  /** Nesting of arrays and objects in a body; more gets 400. */
  readonly maxBodyDepth: number;
  /** Members of all objects in a body, together; more get 400. */
  readonly maxBodyMembers: number;
}

/** The defaults of a `PrefillServer`'s limits. */
export const PREFILL_LIMITS: PrefillLimits = {
  maxConnections: 1024,
  maxConnectionsPerAddress: 512,
  maxRequests: 1024,
  maxRequestsPerAddress: 512,
  maxHeaderBytes: 16 * 1024,
  headerTimeoutMs: 10_000,
  requestTimeoutMs: 30_000,
  idleTimeoutMs: 72_000,
  maxBodyBytes: 4 << 20,
  maxBodiesBytes: 64 << 20,
  maxBodiesBytesPerAddress: 32 << 20,
  maxBodyDepth: 64,
  maxBodyMembers: 20_000,
};

const completionSchema = z.looseObject({
  // One error, however many elements are wrong.
  prompt: z.custom<readonly number[]>(isTokenIds, "must be a list of token ids"),
  kv_transfer_params: z.looseObject({ do_remote_decode: z.literal(true) }),
});

function isTokenIds(prompt: unknown): boolean {
  const isTokenId = (token: unknown) => Number.isSafeInteger(token) && (token as number) >= 0;
  return Array.isArray(prompt) && prompt.length > 0 && prompt.every(isTokenId);
}

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
  readonly #limits: PrefillLimits;
  /** Bytes of bodies by remote address. */
  readonly #bodies = new Map<string, number>();
  #bodiesBytes = 0;

  constructor(options: PrefillServerOptions) {
    this.#options = options;
    this.#random = options.random ?? systemRandom();
    this.#limits = { ...PREFILL_LIMITS, ...options.limits };
    this.server = createLimitedServer(
      this.#limits,
      (request, response) => void this.#serve(request, response),
    );
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
    // The bytes that follow may belong to the refused body.
    if (!request.complete) response.setHeader("connection", "close");
    if (status === 503) response.setHeader("retry-after", "1");
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
    const address = request.socket.remoteAddress ?? "";
    const held = { bytes: 0 };
    try {
      return await this.#completeBody(request, await this.#readJson(request, address, held));
    } finally {
      this.#bodiesBytes -= held.bytes;
      const left = (this.#bodies.get(address) ?? 0) - held.bytes;
      if (left > 0) this.#bodies.set(address, left);
      else this.#bodies.delete(address);
    }
  }

  /** Errors: `KV_REQUEST_INVALID` for a body above a limit, and for what is not JSON; `KV_ENGINE_FAILED` without room for it. */
  async #readJson(request: IncomingMessage, address: string, held: { bytes: number }): Promise<unknown> {
    const { maxBodyBytes, maxBodiesBytes, maxBodiesBytesPerAddress, maxBodyDepth, maxBodyMembers } =
      this.#limits;
    const scan = new JsonScan({
      bodyDepth: maxBodyDepth,
      bodyMembers: maxBodyMembers,
      bodyValues: Number.POSITIVE_INFINITY,
    });
    const collector = new ByteCollector();
    for await (const chunk of request.iterator({ destroyOnReturn: false }) as AsyncIterable<Buffer>) {
      const { length } = chunk;
      const ofAddress = (this.#bodies.get(address) ?? 0) + length;
      if (held.bytes + length > maxBodyBytes)
        throw new KvError("KV_REQUEST_INVALID", `the body is larger than ${maxBodyBytes} bytes`, {
          details: { httpStatus: 413 },
        });
      if (this.#bodiesBytes + length > maxBodiesBytes)
        throw noRoom(`the bodies of all requests are larger than ${maxBodiesBytes} bytes together`);
      if (ofAddress > maxBodiesBytesPerAddress)
        throw noRoom(`the bodies of this address are larger than ${maxBodiesBytesPerAddress} bytes together`);
      held.bytes += length;
      this.#bodiesBytes += length;
      this.#bodies.set(address, ofAddress);
      scan.push(chunk);
      collector.push(chunk);
    }
    try {
      return JSON.parse(collector.take().toString());
    } catch {
      // V8's message repeats the text, which may be a prompt.
      throw new KvError("KV_REQUEST_INVALID", "the body is not JSON");
    }
  }

  async #completeBody(request: IncomingMessage, body: unknown): Promise<Answer> {
    const { prefill, model } = this.#options;
    const parsed = completionSchema.safeParse(body);
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

const noRoom = (message: string) =>
  new KvError("KV_ENGINE_FAILED", message, { details: { httpStatus: 503 } });

const refusal = (status: number, message: string, type = "BadRequestError"): Answer => ({
  status,
  body: { error: { message, type, code: status } },
});

function failure(thrown: unknown): Answer {
  const error = KvError.from(thrown, "KV_INTERNAL", "the prompt could not be served");
  const status = error.details.httpStatus ?? (error.code === "KV_REQUEST_INVALID" ? 400 : 503);
  return refusal(status as number, error.message, error.code);
}
