import { KvError, type KvTransferParams } from "@kv/interface";
import { z } from "zod";
import { exchange, exchangeJson } from "./http.js";
import { type MetricSamples, readMetrics } from "./metrics-text.js";

/** A server that speaks OpenAI's HTTP as vLLM does. All errors are `KV_PROXY_UPSTREAM_FAILED` unless said. */
export interface EngineServer {
  readonly url: string;
  /** Resolves when `/health` is 200. */
  health(): Promise<void>;
  /** Of `/version`; undefined where the server has none. */
  version(): Promise<string | undefined>;
  /** The first model of `/v1/models`; `root` is what the server was started with. */
  model(): Promise<{ readonly id: string; readonly root: string | undefined }>;
  metrics(): Promise<MetricSamples>;
  /** The server's wall clock by its `Date` header, in ms since 1970, whole seconds; with ours before and after. */
  date(): Promise<{ readonly theirsMs: number; readonly fromMs: number; readonly toMs: number } | undefined>;
  /** First leg: the prompt is computed and its blocks are kept. Throws `KV_REQUEST_INVALID` when the answer names no blocks. */
  prefill(prompt: Prompt, options?: CallOptions): Promise<KvTransferParams>;
  /** Second leg: goes on from a peer's blocks. The token ids, where the server tells them. */
  decode(
    prompt: Prompt,
    params: KvTransferParams,
    maxTokens: number,
    options?: CallOptions,
  ): Promise<readonly number[]>;
  /** A request of a token or two: vLLM looks at notifications only in engine steps. */
  nudge(): Promise<void>;
}

export type Prompt = readonly number[] | string;

export interface CallOptions {
  readonly signal?: AbortSignal;
  readonly requestId?: string;
}

export interface EngineServerOptions {
  /** Of a request that computes; 300 s by default. */
  readonly computeTimeoutMs?: number;
  /** Of all others; 5 s by default. */
  readonly timeoutMs?: number;
}

const modelsSchema = z.looseObject({
  data: z.array(z.looseObject({ id: z.string(), root: z.string().nullish() })).min(1),
});
const completionSchema = z.looseObject({
  choices: z.array(z.looseObject({ token_ids: z.array(z.int()).nullish() })),
  kv_transfer_params: z.record(z.string(), z.unknown()).nullish(),
});

export function engineServer(url: string, options: EngineServerOptions = {}): EngineServer {
  const { computeTimeoutMs = 300_000, timeoutMs = 5_000 } = options;
  const get = (path: string) => exchange(`${url}${path}`, { timeoutMs });
  let known: Promise<{ id: string; root: string | undefined }> | undefined;

  async function askModel() {
    const answer = modelsSchema.safeParse(await exchangeJson(`${url}/v1/models`, { timeoutMs }));
    const first = answer.data?.data[0];
    if (first === undefined) throw unreadable(`${url}/v1/models`, "a list of models");
    return { id: first.id, root: first.root ?? undefined };
  }

  function model() {
    known ??= askModel().catch((error: unknown) => {
      known = undefined;
      throw error;
    });
    return known;
  }

  async function complete(
    prompt: Prompt,
    rest: Record<string, unknown>,
    { signal, requestId }: CallOptions = {},
  ) {
    const path = `${url}/v1/completions`;
    const answer = completionSchema.safeParse(
      await exchangeJson(path, {
        method: "POST",
        body: { model: (await model()).id, prompt, temperature: 0, ignore_eos: true, stream: false, ...rest },
        timeoutMs: computeTimeoutMs,
        ...(requestId === undefined ? {} : { headers: { "x-request-id": requestId } }),
        ...(signal === undefined ? {} : { signal }),
      }),
    );
    if (!answer.success) throw unreadable(path, "a completion");
    return answer.data;
  }

  return {
    url,
    async health() {
      const { status } = await get("/health");
      if (status === 200) return;
      throw new KvError("KV_PROXY_UPSTREAM_FAILED", `${url}/health answered ${status}`);
    },
    async version() {
      const { status, text } = await get("/version");
      if (status !== 200) return undefined;
      const found = z.looseObject({ version: z.string().max(200) }).safeParse(parsed(text));
      return found.data?.version;
    },
    model,
    async metrics() {
      const { status, text } = await get("/metrics");
      if (status === 200) return readMetrics(text);
      throw new KvError("KV_PROXY_UPSTREAM_FAILED", `${url}/metrics answered ${status}`);
    },
    async date() {
      const fromMs = Date.now();
      const { headers } = await get("/health");
      const theirsMs = Date.parse(headers.get("date") ?? "");
      return Number.isNaN(theirsMs) ? undefined : { theirsMs, fromMs, toMs: Date.now() };
    },
    async prefill(prompt, call) {
      const asked = { do_remote_decode: true, do_remote_prefill: false };
      const { kv_transfer_params } = await complete(
        prompt,
        { max_tokens: 1, kv_transfer_params: asked },
        call,
      );
      if (kv_transfer_params != null) return kv_transfer_params;
      throw new KvError("KV_REQUEST_INVALID", `${url} computed the prompt and named no blocks`, {
        hint: 'start it with --kv-transfer-config and a NixlConnector, kv_role "kv_producer" or "kv_both"',
      });
    },
    async decode(prompt, params, maxTokens, call) {
      const { choices } = await complete(
        prompt,
        { max_tokens: maxTokens, kv_transfer_params: params, return_token_ids: true },
        call,
      );
      return choices[0]?.token_ids ?? [];
    },
    async nudge() {
      await complete([20, 30], { max_tokens: 1 });
    },
  };
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function unreadable(path: string, wanted: string): KvError {
  return new KvError("KV_PROXY_UPSTREAM_FAILED", `${path} answered 200 with what is not ${wanted}`);
}
