import { type Ambient, KvError, type KvTransferParams } from "@kv/interface";
import type { Engine } from "../engine/engine.js";
import { statusOf } from "./error-response.js";

/**
 * Releases the remote blocks of requests that are refused before the engine has them. The proxy uses that on purpose: it sends a request that
 * every engine refuses, with the parameters of a prompt that nobody will decode.
 */
export class RefusedRequests {
  readonly #engine: Pick<Engine, "releaseRemote"> | undefined;
  readonly #ambient: Pick<Ambient, "random">;

  /** `engine`: that of any data-parallel rank. */
  constructor(engine: Pick<Engine, "releaseRemote"> | undefined, ambient: Pick<Ambient, "random">) {
    this.#engine = engine;
    this.#ambient = ambient;
  }

  /**
   * Runs `submit`. When it refuses the body (4xx), the prefill instance that the body names is notified. A refusal that another
   * instance may not repeat (5xx) releases nothing: the proxy tries the next one.
   */
  watch<T>(body: unknown, submit: () => T): T {
    try {
      return submit();
    } catch (error) {
      const params = (body as { kv_transfer_params?: unknown } | null | undefined)?.kv_transfer_params;
      if (isRefusal(error) && typeof params === "object" && params !== null && !Array.isArray(params))
        this.#engine?.releaseRemote(`refused-${this.#ambient.random.uuid()}`, params as KvTransferParams);
      throw error;
    }
  }
}

function isRefusal(error: unknown): boolean {
  if (!KvError.is(error)) return false;
  const status = statusOf(error);
  return status >= 400 && status < 499;
}
