import {
  type BlockIds,
  type Clock,
  type KvCacheConfig,
  KvError,
  type Log,
  type Staging,
  type Tracer,
} from "@kv/interface";
import { groupBlockTokens } from "@kv/plan";
import type { StagedRequest, StagingCopied } from "./staging-step.js";

/** Prefill: the running requests, and how many blocks of each have been copied into the pool. */
export interface Saves {
  openWith(config: KvCacheConfig): void;
  expect(order: StagedRequest): void;
  forget(requestId: string): void;
  /**
   * As `forget`, for a request that has ended. Logs an error when the engine never named its last
   * tokens: peers read blocks that were not copied.
   */
  ended(requestId: string): void;
  /**
   * Copies the blocks that were computed since the last call. A request that `computed` leaves out
   * has no new tokens; one that it never named has all of them, and so has every request without
   * `computed`. Waits for all copies, then throws if any failed.
   */
  run(computed: Readonly<Record<string, number>> | undefined): Promise<void>;
  readonly size: number;
}

export interface SavesOptions {
  readonly clock: Clock;
  readonly log: Log;
  readonly tracer: Tracer | undefined;
  readonly onCopied?: (copied: StagingCopied) => void;
  staging(): Staging;
}

interface Saving {
  readonly order: StagedRequest;
  /**
   * Tokens, of those that the engine has named, whose blocks are copied as far as they are full.
   */
  savedTokens: number;
  /**
   * Tokens that the engine has computed, by its last word; undefined until it names the request,
   * and again after a call that names none.
   */
  named: number | undefined;
}

export function createSaves({ clock, log, tracer, onCopied, staging }: SavesOptions): Saves {
  const requests = new Map<string, Saving>();
  let blockTokens: readonly number[] = [];

  return {
    openWith(config) {
      blockTokens = groupBlockTokens(config);
    },
    expect: (order) =>
      void requests.set(order.requestId, { order, savedTokens: 0, named: undefined }),
    forget: (requestId) => void requests.delete(requestId),
    ended(requestId) {
      const request = requests.get(requestId);
      requests.delete(requestId);
      if (request?.named === undefined || request.savedTokens >= request.order.numTokens) return;
      const { savedTokens, order } = request;
      log.error("staging-save-incomplete", { requestId, savedTokens, numTokens: order.numTokens });
    },
    async run(computed) {
      const failures = new Map<string, KvError>();
      await Promise.all(
        [...requests.values()].map(async (request) => {
          const { order, savedTokens } = request;
          const { requestId, numTokens } = order;
          const named = computed && (computed[requestId] ?? request.named);
          request.named = named;
          const tokens = Math.min(named ?? numTokens, numTokens);
          const begun = named === undefined ? 0 : savedTokens;
          if (tokens <= begun) return;
          // A partial block is copied once it is full, or at the end of the prompt. Each group has
          // blocks of its own size.
          const end = tokens === numTokens ? Math.ceil : Math.floor;
          const cut = (ids: BlockIds) =>
            ids.map((group, index) => {
              const each = blockTokens[index] ?? 1;
              return group.slice(Math.floor(begun / each), end(tokens / each));
            });
          const startedMs = clock.now();
          const wire = cut(order.wire);
          if (wire.every((ids) => ids.length === 0)) return;
          const span = tracer?.start("kv.stage_save", {
            parent: order.traceparent,
            attributes: { "kv.blocks": wire.flat().length },
          });
          try {
            await staging().save(requestId, { device: cut(order.device), wire });
            span?.end();
            // What was copied on no word of the engine is copied again when it names the request.
            if (named !== undefined) request.savedTokens = tokens;
            onCopied?.({ requestId, direction: "save", wire, durationMs: clock.now() - startedMs });
          } catch (error) {
            span?.end(error);
            failures.set(
              requestId,
              KvError.from(error, "KV_STAGING_FAILED", `saving request ${requestId}`),
            );
          }
        }),
      );
      const [first] = failures.values();
      if (first === undefined) return;
      throw new KvError("KV_STAGING_FAILED", first.message, {
        cause: first,
        details: { requestIds: [...failures.keys()] },
      });
    },
    get size() {
      return requests.size;
    },
  };
}
