import { KvError, type KvTransferParams } from "@kv/interface";
import { z } from "zod";
import { parseJson, requestJson, sendRequest } from "./http-request.js";
import { type MetricSamples, parsePrometheusText } from "./prometheus-text.js";

/** A prompt as text or as token ids. */
export type Prompt = readonly number[] | string;

/** Options of a request that computes. */
export interface CallOptions {
  /** Aborts the request. */
  readonly signal?: AbortSignal | undefined;
  /** Sent as `X-Request-Id`; the server generates an id when absent. */
  readonly requestId?: string | undefined;
}

/** Options of an `EngineServer`. */
export interface EngineServerOptions {
  /** Limit of a request that computes, in ms. @default 300_000 */
  readonly computeTimeoutMs?: number | undefined;
  /** Limit of every other request, in ms. @default 5_000 */
  readonly timeoutMs?: number | undefined;
}

/**
 * The time on a server, from the `Date` header of an answer (whole seconds), and the local time
 * around it, all in ms since 1970.
 */
export interface ServerDate {
  readonly theirsMs: number;
  /** The local time before the request was sent. */
  readonly fromMs: number;
  /** The local time after the answer arrived. */
  readonly toMs: number;
}

/** A model of `/v1/models`. */
export interface ServedModel {
  /** The name that clients use. */
  readonly id: string;
  /** The name or path that the server was started with, where it is announced. */
  readonly root: string | undefined;
}

/** What a client gets. */
export interface Answer {
  /** The token ids that were generated; empty where the server does not answer them. */
  readonly tokens: readonly number[];
  readonly text: string;
}

/** The shortest prompt: the server keeps one block of it until it is notified, or a lease ends. */
export const PROBE_PROMPT: Prompt = [20, 30];

const modelsSchema = z.looseObject({
  data: z.array(z.looseObject({ id: z.string(), root: z.string().nullish() })).min(1),
});
const completionSchema = z.looseObject({
  choices: z.array(
    z.looseObject({ token_ids: z.array(z.int()).nullish(), text: z.string().nullish() }),
  ),
  kv_transfer_params: z.record(z.string(), z.unknown()).nullish(),
});

/**
 * A client of one server with the HTTP interface of vLLM, such as "http://p1:8000". Nothing is sent
 * before the first call. Errors of all methods, unless said otherwise: `KV_PROXY_UPSTREAM_FAILED`.
 */
export class EngineServer {
  /** The server's base URL, without a path. */
  readonly url: string;
  readonly #computeTimeoutMs: number;
  readonly #timeoutMs: number;
  #model: Promise<ServedModel> | undefined;

  constructor(url: string, options: EngineServerOptions = {}) {
    this.url = url;
    this.#computeTimeoutMs = options.computeTimeoutMs ?? 300_000;
    this.#timeoutMs = options.timeoutMs ?? 5_000;
  }

  /** Resolves when `/health` answers 200. */
  async health(): Promise<void> {
    const { status } = await this.#get("/health");
    if (status === 200) return;
    throw new KvError("KV_PROXY_UPSTREAM_FAILED", `${this.url}/health answered ${status}`);
  }

  /** The version that `/version` announces; undefined when the server has no such route. */
  async version(): Promise<string | undefined> {
    const { status, text } = await this.#get("/version");
    if (status !== 200) return undefined;
    return z.looseObject({ version: z.string().max(200) }).safeParse(parseJson(text)).data?.version;
  }

  /** The first model of `/v1/models`; asked for once. */
  async model(): Promise<ServedModel> {
    this.#model ??= this.#fetchModel();
    try {
      return await this.#model;
    } catch (error) {
      this.#model = undefined;
      throw error;
    }
  }

  async metrics(): Promise<MetricSamples> {
    const { status, text } = await this.#get("/metrics");
    if (status === 200) return parsePrometheusText(text);
    throw new KvError("KV_PROXY_UPSTREAM_FAILED", `${this.url}/metrics answered ${status}`);
  }

  /** The server's wall clock; undefined when its answers have no `Date` header. */
  async date(): Promise<ServerDate | undefined> {
    const fromMs = Date.now();
    const { headers } = await this.#get("/health");
    const theirsMs = Date.parse(headers.get("date") ?? "");
    return Number.isNaN(theirsMs) ? undefined : { theirsMs, fromMs, toMs: Date.now() };
  }

  /**
   * Sends the prefill request of a pair: the server computes the prompt, keeps its blocks and
   * answers where they are.
   *
   * @throws `KV_REQUEST_INVALID` when the answer has no `kv_transfer_params`.
   */
  async prefill(prompt: Prompt, options?: CallOptions): Promise<KvTransferParams> {
    const { kv_transfer_params } = await this.#complete(
      prompt,
      { max_tokens: 1, kv_transfer_params: { do_remote_decode: true, do_remote_prefill: false } },
      options,
    );
    if (kv_transfer_params != null) return kv_transfer_params;
    throw new KvError(
      "KV_REQUEST_INVALID",
      `${this.url} computed the prompt and answered no kv_transfer_params`,
      {
        hint: 'start it with --kv-transfer-config and a NixlConnector, kv_role "kv_producer" or "kv_both"',
      },
    );
  }

  /**
   * Sends the decode request of a pair. Resolves with the token ids that the server generated;
   * empty when it does not answer them.
   */
  async decode(
    prompt: Prompt,
    params: KvTransferParams,
    maxTokens: number,
    options?: CallOptions,
  ): Promise<readonly number[]> {
    const { choices } = await this.#complete(
      prompt,
      { max_tokens: maxTokens, kv_transfer_params: params, return_token_ids: true },
      options,
    );
    return choices[0]?.token_ids ?? [];
  }

  /** Sends a prompt as a client does. */
  async complete(prompt: Prompt, maxTokens: number, options?: CallOptions): Promise<Answer> {
    const { choices } = await this.#complete(
      prompt,
      { max_tokens: maxTokens, return_token_ids: true },
      options,
    );
    return { tokens: choices[0]?.token_ids ?? [], text: choices[0]?.text ?? "" };
  }

  /** Sends the probe prompt: vLLM processes notifications and leases only in engine steps. */
  async nudge(): Promise<void> {
    await this.#complete(PROBE_PROMPT, { max_tokens: 1 });
  }

  #get(path: string) {
    return sendRequest(`${this.url}${path}`, { timeoutMs: this.#timeoutMs });
  }

  async #fetchModel(): Promise<ServedModel> {
    const url = `${this.url}/v1/models`;
    const answer = modelsSchema.safeParse(await requestJson(url, { timeoutMs: this.#timeoutMs }));
    const first = answer.data?.data[0];
    if (first === undefined) throw unexpectedBody(url, "a list of models");
    return { id: first.id, root: first.root ?? undefined };
  }

  async #complete(
    prompt: Prompt,
    fields: Record<string, unknown>,
    { signal, requestId }: CallOptions = {},
  ): Promise<z.infer<typeof completionSchema>> {
    const url = `${this.url}/v1/completions`;
    const { id: model } = await this.model();
    const answer = completionSchema.safeParse(
      await requestJson(url, {
        method: "POST",
        body: { model, prompt, temperature: 0, ignore_eos: true, stream: false, ...fields },
        timeoutMs: this.#computeTimeoutMs,
        headers: requestId === undefined ? undefined : { "x-request-id": requestId },
        signal,
      }),
    );
    if (!answer.success) throw unexpectedBody(url, "a completion");
    return answer.data;
  }
}

function unexpectedBody(url: string, expected: string): KvError {
  return new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `${url} answered 200 with a body that is not ${expected}`,
  );
}
